"""Runs the server: startup, signals, draining and shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.resolve import resolve_model
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.server.access.keys import KeySources, KeyTable
from chairlift.server.gc_tuning import freeze_loaded_objects
from chairlift.server.http.app import make_app
from chairlift.server.http.host_names import HostNames
from chairlift.server.http.listener import Certificate, listen, listening_address
from chairlift.server.http.protocol import GuardedProtocol
from chairlift.server.limits import Limits
from chairlift.server.metrics import Metrics
from chairlift.server.process.device_check import check_device
from chairlift.server.process.engine_client import EngineClient, EngineState, Supervision
from chairlift.server.process.socket_folder import remove_stale_folders
from chairlift.server.served_model import ServedModel, read_chat_template
from chairlift.server.service import Service

log = logging.getLogger("chairlift.server")

MAX_OPEN_FILES = 65_536


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
    log_level: str = "info"
    chat_template: Path | None = None  # replaces the model's
    keys: KeySources = field(default_factory=KeySources)
    isolate_keys: bool = False  # whether requests with different keys share no cached prefixes
    cors_origins: Sequence[str] = ()  # origins of web pages that may call the server
    allowed_hosts: Sequence[str] = ()  # further host names that a server without keys answers to
    drain_timeout: float = 30.0
    limits: Limits = field(default_factory=Limits)
    supervision: Supervision = field(default_factory=Supervision)
    tool_format: str | None = None  # tool-call format; None: detected from the chat template
    dashboard: bool = True  # whether to serve /dashboard
    public_metrics: bool = False  # whether /metrics needs no key
    policy_switch: bool | None = None  # whether clients may change the policy; None: only if the server is local
    quiet: bool = False

    def may_switch_policy(self) -> bool:
        if self.policy_switch is not None:
            return self.policy_switch
        return not self.keys and (self.host == "localhost" or self.host == "::1" or self.host.startswith("127."))


async def serve_forever(
    config: ServerConfig, on_ready: Callable[[Service, str], None] = lambda service, address: None
) -> int:
    """Serve until a signal arrives; `on_ready` is called with the address.

    Returns the exit status: 0 after draining, 1 if the engine failed permanently, and 128 plus the signal's number if a
    second signal cut the draining short. Raises if the engine cannot start.
    """
    _raise_file_limit()
    check_device(config.engine.get("device", "auto"))
    remove_stale_folders()
    resolve_model(config.model, progress=not config.quiet)  # first, so that errors are reported at once
    hosts = HostNames(config.host, config.allowed_hosts)
    template = read_chat_template(config.chat_template)
    if config.certificate is not None:
        config.certificate.check()
    listener = listen(config.host, config.port, config.uds)
    service = make_service(config, template)
    keys = KeyTable(config.keys.read())
    app = make_app(
        service,
        keys,
        config.cors_origins,
        dashboard=config.dashboard,
        hosts=hosts,
        public_metrics=config.public_metrics,
        access_log=config.access_log,
    )
    server = _Server(uvicorn_config(app, config.limits, config.certificate))
    freeze_loaded_objects()
    signals = _Signals()
    _reload_on_hangup(config, keys, server)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        address = listening_address(listener, config.host, secure=config.certificate is not None)
        return await _run(config, service, server, serving, signals, lambda: on_ready(service, address))
    finally:
        # Before the server exits, so that unfinished requests get an error response.
        await service.engine.stop(timeout=0.0 if signals.second else 5.0)
        server.should_exit = True
        await serving
        if config.uds is not None:
            config.uds.unlink(missing_ok=True)


def make_service(config: ServerConfig, chat_template: str | None = None) -> Service:
    """Build the front end without HTTP. The application's lifespan starts the engine."""
    # The front end needs only the tokenizer; the model is downloaded here to show a progress bar.
    path = resolve_model(config.model, progress=not config.quiet)
    tokenizer = make_tokenizer(open_checkpoint(path), chat_template)
    metrics = Metrics()
    engine = EngineClient(
        str(path),
        config.engine,
        metrics.record_step,
        metrics.record_restart,
        config.supervision,
        log_level=config.log_level,
    )
    name, *aliases = config.served_names or [config.model]
    return Service(
        ServedModel.create(
            name,
            tokenizer,
            config.tool_format,
            aliases,
            reasoning_parser=config.engine.get("reasoning_parser"),
        ),
        engine,
        metrics,
        config.limits,
        isolate_keys=config.isolate_keys,
        policy_switch=config.may_switch_policy(),
    )


def uvicorn_config(app: FastAPI, limits: Limits, certificate: Certificate | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(limits.keep_alive_seconds),
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        ssl_certfile=None if certificate is None else certificate.certfile,
        ssl_keyfile=None if certificate is None else certificate.keyfile,
    )


async def _run(
    config: ServerConfig,
    service: Service,
    server: _Server,
    serving: asyncio.Task[None],
    signals: _Signals,
    on_ready: Callable[[], None],
) -> int:
    signalled = asyncio.create_task(signals.first.wait())
    settled = asyncio.create_task(service.engine.wait_until_settled())
    await asyncio.wait({signalled, settled, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return 1
    if settled.done() and settled.result() is EngineState.READY:
        on_ready()
    while not signalled.done() and not serving.done():
        if service.engine.state is EngineState.FAILED:
            if service.engine.loaded is None:
                raise _cannot_start(service.engine)
            log.error("the engine failed: %s", service.engine.problem)
            return 1
        await asyncio.wait({signalled, serving}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    await _drain(service, server, config.drain_timeout, signals)
    return 128 + signals.second if signals.second else 0


def _cannot_start(engine: EngineClient) -> ChairliftError:
    if engine.bad_parameter is not None:
        return InvalidParameter(engine.bad_parameter, engine.problem)
    return EngineDead(f"the engine cannot start: {engine.problem}")


async def _drain(service: Service, server: _Server, timeout: float, signals: _Signals) -> None:
    """Refuse new requests and wait for those in flight."""
    service.admission.draining = True
    service.subscribers.close()
    deadline = asyncio.get_running_loop().time() + timeout
    while server.server_state.tasks and not signals.second and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


class _Signals:
    """SIGTERM and SIGINT: the first one starts draining, the second one ends it."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = 0  # the number of the second signal
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.first.is_set():
            self.second = number
        self.first.set()


def _reload_on_hangup(config: ServerConfig, keys: KeyTable, server: _Server) -> None:
    """Read the key file and the certificate again on SIGHUP. Without them the signal ends the server, as usual."""

    def reload() -> None:
        try:
            keys.replace(config.keys.read())
            if config.certificate is not None and server.config.ssl is not None:
                config.certificate.load_into(server.config.ssl)
        except InvalidParameter as error:
            log.error("nothing is changed, because a file cannot be used: %s", error)
        else:
            log.warning("the API keys and the certificate were read again")

    if config.keys.file is not None or config.certificate is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _raise_file_limit() -> None:
    """Raise the limit on file descriptors, usually 1,024: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        """Disable uvicorn's signal handlers, which would stop without draining; see `_Signals`."""
        return nullcontext()
