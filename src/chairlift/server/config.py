"""The configuration of a server, made of its options, and as bytes for its workers."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from chairlift.config import MAX_LORAS
from chairlift.core.orderings.base import FcfsOrdering
from chairlift.core.orderings.fair import parse_weights
from chairlift.errors import InvalidParameter
from chairlift.options import parse_bytes
from chairlift.server.access import FILE_PARAMETER, KeySources
from chairlift.server.batch.folder import FilesFolder
from chairlift.server.http.listener import Certificate
from chairlift.server.options import STANDARD_OUTPUT, ServerOptions
from chairlift.server.process.engine_client import Supervision
from chairlift.server.process.this_process import ENGINE_MODULE
from chairlift.server.stored.store import ResponseStore
from chairlift.server.wire.classes import ServiceClasses
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.unknown_fields import UnknownFieldsRule


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model: str
    served_names: Sequence[str] = ()  # empty: as `model`
    engine: dict[str, Any] = field(default_factory=dict)  # options of EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None  # Unix socket to listen on instead
    certificate: Certificate | None = None  # None: HTTP without TLS
    access_log: Path | None = None  # "-" for standard output
    access_log_salt: str = ""  # Prompts are hashed with it; `server_config` draws one.
    traces_endpoint: str | None = None  # OpenTelemetry's; None: no traces
    log_level: str = "info"
    engine_log_level: str | None = None  # None: as `log_level`
    request_log: bool = False  # whether standard error gets a line per request
    keys: KeySources = field(default_factory=KeySources)
    classes: ServiceClasses = field(default_factory=ServiceClasses)
    isolate_keys: bool = False  # whether requests with different keys share nothing, and only administrators see all
    cors_origins: Sequence[str] = ()  # origins of web pages that may call the server
    image_hosts: Sequence[str] = ()  # images may be fetched from these by URL
    allowed_hosts: Sequence[str] = ()  # A server without keys answers to these host names, too.
    lora_folder: Path | None = None  # Adapters may be loaded from below it.
    files_dir: Path | None = None  # Uploaded files and batches are there; None: there are none
    files_quota: int = 10 * 2**30  # bytes of the files of one key
    responses_dir: Path | None = None  # Responses and conversations are kept there; None: they are not kept
    responses_expiry: float = 30.0  # days after the last use
    responses_quota: int = 2**30  # bytes of the responses and conversations of one key
    drain_timeout: float = 30.0
    api_workers: int = 1  # HTTP processes; with more than one, a further process joins them with the engine
    engine_module: str = ENGINE_MODULE  # run as the engine process; tests and benchmarks run others
    limits: Limits = field(default_factory=Limits)
    supervision: Supervision = field(default_factory=Supervision)
    unknown_fields: UnknownFieldsRule = "ignore"  # what happens to fields of requests that are not known
    tool_format: str | None = None  # tool-call format; None: detected from the chat template
    dashboard: bool = True  # whether to serve /dashboard
    public_metrics: bool = False  # whether /metrics needs no key
    policy_switch: bool | None = None  # whether clients may change the policy; None: only if the server is local
    quiet: bool = False

    @property
    def model_name(self) -> str:
        """The name of the model in responses."""
        return self.served_names[0] if self.served_names else self.model

    def may_switch_policy(self) -> bool:
        if self.policy_switch is not None:
            return self.policy_switch
        return not self.keys and (self.host == "localhost" or self.host == "::1" or self.host.startswith("127."))


def server_config(
    server: ServerOptions, model: str, engine: dict[str, Any], *, quiet: bool = False, verbose: bool = False
) -> ServerConfig:
    """Return the configuration of a server; `engine` are the options of `EngineConfig`."""
    order = engine.get("order") or FcfsOrdering.name
    classes = ServiceClasses.of(server.classes or (), order, engine.get("budget"))
    keys = _key_sources(server, classes)
    files_quota = parse_bytes("files_quota", server.files_quota)
    if server.isolate_keys and not keys:
        raise InvalidParameter("isolate_keys", "needs API keys; give some with --api-key")
    if server.lora_folder is not None:
        engine = _with_room_for_adapters(server, engine)
    if server.files_dir is not None:
        FilesFolder(server.files_dir, files_quota)  # refuses a folder that cannot be written
    responses_quota = parse_bytes("responses_quota", server.responses_quota)
    if server.responses_dir is not None:
        ResponseStore(server.responses_dir, responses_quota, 0.0).close()  # refuses what it cannot use
    if server.access_log_salt is not None and server.access_log is None:
        raise InvalidParameter("access_log_salt", "goes with --access-log, whose hashes it is for")
    names = {option.name for option in fields(ServerOptions)} & {one.name for one in fields(ServerConfig)}
    shared = {name: getattr(server, name) for name in names}  # options that the configuration has under the same name
    shared |= {"classes": classes, "files_quota": files_quota, "responses_quota": responses_quota}
    shared |= {"log_level": server.log_level or ("error" if quiet else "info")}
    shared["access_log_salt"] = server.access_log_salt or secrets.token_hex(16)
    shared["request_log"] = _logs_requests(server, quiet=quiet)
    return ServerConfig(
        model=model,
        engine=engine,
        quiet=quiet,
        # What the engine says while it starts is for those who ask; its warnings are for all.
        engine_log_level=server.log_level or ("error" if quiet else "info" if verbose else "warning"),
        served_names=server.served_model_name or (),
        certificate=_certificate(server),
        traces_endpoint=server.otlp_traces_endpoint,
        keys=keys,
        cors_origins=server.cors_origin or (),
        allowed_hosts=server.allowed_host or (),
        image_hosts=server.allow_image_urls or (),
        limits=Limits(
            max_waiting=server.max_waiting,
            max_connections=server.max_connections,
            tenant_weights=parse_weights(engine.get("tenant_weights")),
            default_timeout=server.request_timeout,
        ),
        supervision=Supervision(heartbeat_timeout=server.heartbeat_timeout, step_timeout=server.step_timeout),
        **shared,
    )


def _with_room_for_adapters(server: ServerOptions, engine: dict[str, Any]) -> dict[str, Any]:
    """The engine's options for a server whose adapters are loaded later."""
    assert server.lora_folder is not None
    if not server.lora_folder.is_dir():
        raise InvalidParameter("lora_folder", f"{str(server.lora_folder)!r:.200} is not a folder")
    if server.api_workers > 1:
        raise InvalidParameter("lora_folder", "needs one API worker: adapters are loaded through it")
    return engine if engine.get("lora") else {"max_loras": MAX_LORAS} | engine


def _logs_requests(server: ServerOptions, *, quiet: bool) -> bool:
    """Whether standard error gets a line per request: by default on a terminal that has no access log yet."""
    if server.request_log is not None:
        return server.request_log
    return not quiet and sys.stderr.isatty() and server.access_log != STANDARD_OUTPUT


def _certificate(server: ServerOptions) -> Certificate | None:
    if server.ssl_certfile is not None:
        return Certificate(server.ssl_certfile, server.ssl_keyfile)
    if server.ssl_keyfile is not None:
        raise InvalidParameter("ssl_keyfile", "needs a certificate; give it with --ssl-certfile")
    return None


def _key_sources(server: ServerOptions, classes: ServiceClasses) -> KeySources:
    texts = [*(server.api_key or ())]
    if "CHAIRLIFT_API_KEY" in os.environ:  # an empty key is an error and must not open the server
        texts.append(os.environ["CHAIRLIFT_API_KEY"])
    sources = KeySources(texts, server.api_key_file)
    for key in sources.read():  # raises for what is wrong with them, before anything is loaded
        classes.check_key_class(FILE_PARAMETER, key.service_class)
    return sources


def encode_config(config: ServerConfig) -> bytes:
    """Return the configuration as bytes; of its values, msgpack has no type for paths only."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(data: bytes) -> ServerConfig:
    return msgspec.msgpack.decode(data, type=ServerConfig, dec_hook=lambda kind, value: kind(value))
