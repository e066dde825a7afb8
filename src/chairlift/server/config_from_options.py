"""The configuration of a server from its options."""

from __future__ import annotations

import os
from typing import Any

from chairlift.byte_sizes import parse_bytes
from chairlift.core.orderings.fair import parse_weights
from chairlift.errors import InvalidParameter
from chairlift.server.access.keys import KeySources
from chairlift.server.config import ServerConfig
from chairlift.server.files.folder import FilesFolder
from chairlift.server.http.listener import Certificate
from chairlift.server.limits import Limits
from chairlift.server.options import ServerOptions
from chairlift.server.process.engine_client import Supervision


def server_config(server: ServerOptions, model: str, engine: dict[str, Any], *, quiet: bool = False) -> ServerConfig:
    """Return the configuration of a server; `engine` are the options of `EngineConfig`."""
    keys = _key_sources(server)
    files_quota = parse_bytes("files_quota", server.files_quota)
    if server.isolate_keys and not keys:
        raise InvalidParameter("isolate_keys", "needs API keys; give some with --api-key")
    if server.files_dir is not None:
        FilesFolder(server.files_dir, files_quota)  # refuses a folder that cannot be written
    return ServerConfig(
        model=model,
        served_names=server.served_model_name or (),
        engine=engine,
        host=server.host,
        port=server.port,
        uds=server.uds,
        certificate=_certificate(server),
        access_log=server.access_log,
        traces_endpoint=server.otlp_traces_endpoint,
        log_level=server.log_level or ("warning" if quiet else "info"),
        chat_template=server.chat_template,
        keys=keys,
        isolate_keys=server.isolate_keys,
        cors_origins=server.cors_origin or (),
        allowed_hosts=server.allowed_host or (),
        files_dir=server.files_dir,
        files_quota=files_quota,
        drain_timeout=server.drain_timeout,
        api_workers=server.api_workers,
        limits=Limits(
            max_waiting=server.max_waiting,
            max_connections=server.max_connections,
            tenant_weights=parse_weights(engine.get("tenant_weights")),
            default_timeout=server.request_timeout,
        ),
        supervision=Supervision(heartbeat_timeout=server.heartbeat_timeout, step_timeout=server.step_timeout),
        unknown_fields="refuse" if server.unknown_fields == "refuse" else "ignore",
        tool_format=server.tool_format,
        dashboard=server.dashboard,
        public_metrics=server.public_metrics,
        policy_switch=server.policy_switch,
        quiet=quiet,
    )


def _certificate(server: ServerOptions) -> Certificate | None:
    if server.ssl_certfile is not None:
        return Certificate(server.ssl_certfile, server.ssl_keyfile)
    if server.ssl_keyfile is not None:
        raise InvalidParameter("ssl_keyfile", "needs a certificate; give it with --ssl-certfile")
    return None


def _key_sources(server: ServerOptions) -> KeySources:
    texts = [*(server.api_key or ())]
    if "CHAIRLIFT_API_KEY" in os.environ:  # an empty key is an error and must not open the server
        texts.append(os.environ["CHAIRLIFT_API_KEY"])
    sources = KeySources(texts, server.api_key_file)
    sources.read()  # raises for what is wrong with them, before anything is loaded
    return sources
