"""The HTTP front end of one process."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.loading.resolve import resolve_model
from chairlift.machine.files import connection_limit
from chairlift.machine.hardware import count_gpus
from chairlift.server.access import APIKey, KeyTable
from chairlift.server.app import make_app
from chairlift.server.config import ServerConfig
from chairlift.server.files.folder import FilesFolder
from chairlift.server.http.boundary import make_tracer_provider
from chairlift.server.http.connections import Acceptor, Connections, GuardedProtocol
from chairlift.server.http.guards import HostNames
from chairlift.server.http.listener import Certificate
from chairlift.server.http.service import Service
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient
from chairlift.server.process.this_process import freeze_loaded_objects
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.limits import Limits


def load_served_model(config: ServerConfig, chat_template: str | None = None) -> ServedModel:
    """Load what a front end needs of the model: the tokenizer."""
    # The model is downloaded here to show a progress bar.
    path, names = resolve_model(config.model, progress=not config.quiet), (config.model_name, *config.served_names[1:])
    return ServedModel.load(path, names, config.engine, tool_format=config.tool_format, chat_template=chat_template)


def make_service(config: ServerConfig, engine: EngineClient, metrics: Metrics, chat_template: str | None) -> Service:
    """Build the front end without HTTP. The application's lifespan starts the engine."""
    return Service.local(
        load_served_model(config, chat_template),
        engine,
        metrics,
        config.limits,
        isolate_keys=config.isolate_keys,
        policy_switch=config.may_switch_policy(),
    )


class HTTPServer:
    """A service on a socket, with keys that can be replaced."""

    def __init__(self, config: ServerConfig, service: Service, keys: list[APIKey], *, shared: bool = False) -> None:
        """`shared`: whether other processes accept connections from the same socket."""
        self.service = service
        self._config = config
        self._keys = KeyTable(keys)
        app = make_app(
            service,
            self._keys,
            config.cors_origins,
            dashboard=config.dashboard,
            hosts=HostNames(config.host, config.allowed_hosts, config.cors_origins),
            public_metrics=config.public_metrics,
            access_log=config.access_log,
            unknown_fields=config.unknown_fields,
            files=None if config.files_dir is None else FilesFolder(config.files_dir, config.files_quota),
            tracer_provider=None if config.traces_endpoint is None else make_tracer_provider(config.traces_endpoint),
        )
        self._server = UvicornServer(app, config.limits, config.certificate, shared=shared)
        freeze_loaded_objects()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[listener])

    async def wait_until_listening(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)

    def reload(self, keys: list[APIKey]) -> None:
        """Replace the keys, and read the certificate again."""
        self._keys.replace(keys)
        if self._config.certificate is not None and self._server.config.ssl is not None:
            self._config.certificate.load_into(self._server.config.ssl)

    def drain(self) -> None:
        self.service.admission.draining = True
        self.service.subscribers.close()

    @property
    def is_idle(self) -> bool:
        return not self._server.server_state.tasks

    def stop(self) -> None:
        self._server.should_exit = True


class LocalFrontEnd(HTTPServer):
    """The front end of a server with one HTTP process, which also supervises the engine."""

    def __init__(self, config: ServerConfig, chat_template: str | None, engine: EngineClient, metrics: Metrics) -> None:
        self.engine = engine
        super().__init__(config, make_service(config, engine, metrics, chat_template), config.keys.read())


class UvicornServer(uvicorn.Server):
    """A server that limits its connections, and leaves signals to its owner."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        certificate: Certificate | None = None,
        *,
        shared: bool = False,
        files_per_connection: int = 1,
    ) -> None:
        """`shared`: whether other processes accept connections from the same socket."""
        super().__init__(_uvicorn_config(app, limits, certificate))
        self._limits = limits
        self._shared = shared
        self._log_limit = LogLimit()
        self._connections = Connections(connection_limit(limits.max_connections, files_per_connection))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._log_limit.apply()
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise ChairliftError("the HTTP server cannot start; the log says why")
        make_protocol = partial(
            GuardedProtocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            limits=self._limits,
            connections=self._connections,
        )
        self.servers: list[Any] = [
            Acceptor(
                listener,
                self._connections,
                make_protocol,
                self.config.ssl,
                handshake_seconds=self._limits.header_seconds,
                shared=self._shared,
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._log_limit.remove()

    def capture_signals(self) -> Any:
        """Disable uvicorn's signal handlers, which would stop without draining; see `lifecycle`."""
        return nullcontext()


def _uvicorn_config(app: ASGIApp, limits: Limits, certificate: Certificate | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        lifespan="on",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(limits.keep_alive_seconds),
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        ssl_certfile=None if certificate is None else certificate.certfile,
        ssl_keyfile=None if certificate is None else certificate.keyfile,
    )


def make_engine(config: ServerConfig, metrics: Metrics) -> EngineClient:
    """Build the client of an engine that is not started yet."""
    return EngineClient(
        str(resolve_model(config.model, progress=not config.quiet)),
        config.engine,
        metrics.record_step,
        metrics.record_restart,
        config.supervision,
        log_level=config.log_level,
        module=config.engine_module,
    )


def check_device(device: str) -> None:
    """Raise if `device` is a GPU that this machine does not have."""
    if not device.startswith("cuda"):
        return
    count, index = count_gpus(), int(device.partition(":")[2] or 0)
    if not count:
        raise InvalidParameter("device", "there is no CUDA device here; choose cpu")
    if index >= count:
        raise InvalidParameter("device", f"{device} does not exist; there are {count} CUDA devices, from cuda:0")


LOGGERS = ("asyncio", "chairlift.cluster", "chairlift.server", "python_multipart.multipart", "uvicorn.error")
MAX_LINES = 10  # One statement of the program may log as many.
PERIOD_SECONDS = 60.0


class LogLimit(logging.Filter):
    """Passes at most MAX_LINES records of one statement in a period; the next period says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[tuple[str, int], tuple[float, int]] = {}  # when it began, and the records since then

    def apply(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self)

    def remove(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        start, count = self._periods.get(place, (now, 0))
        if now - start >= PERIOD_SECONDS:
            if count > MAX_LINES:
                record.msg = f"{record.getMessage()} ({count - MAX_LINES} more such lines were left out)"
                record.args = None
            start, count = now, 0
        self._periods[place] = start, count + 1
        return count < MAX_LINES
