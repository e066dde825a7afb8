"""The HTTP front end of one process: the server that runs the application, and what it is made of."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chairlift.errors import EngineDead
from chairlift.loading.resolve import resolve_model
from chairlift.server.access import APIKey, KeyTable
from chairlift.server.application import make_app
from chairlift.server.batch.folder import FilesFolder
from chairlift.server.batch.run import BatchResponse, Send, call
from chairlift.server.config import ServerConfig
from chairlift.server.http.boundary import make_tracer_provider
from chairlift.server.http.guards import HostNames
from chairlift.server.http.listener import UvicornServer
from chairlift.server.http.request_log import LINES_PER_SECOND, RequestLog
from chairlift.server.http.routes import Service
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.process.this_process import freeze_loaded_objects
from chairlift.server.served_model import ServedModel
from chairlift.server.stored.routes import StoredResponses
from chairlift.server.stored.store import ResponseStore

DAY = 86_400.0  # seconds


def _response_store(config: ServerConfig) -> ResponseStore | None:
    if config.responses_dir is None:
        return None
    return ResponseStore(config.responses_dir, config.responses_quota, config.responses_expiry * DAY)


def request_log(config: ServerConfig) -> RequestLog | None:
    """The log of one of the server's HTTP processes, which together write as many lines as one."""
    return RequestLog(max(1, LINES_PER_SECOND // config.api_workers)) if config.request_log else None


class HTTPServer:
    """A service on a socket, with keys that can be replaced."""

    def __init__(self, config: ServerConfig, service: Service, keys: list[APIKey], *, shared: bool = False) -> None:
        """`shared`: whether other processes accept connections from the same socket."""
        self.service = service
        self._config = config
        self._keys = KeyTable(keys)
        self._app = make_app(
            service,
            self._keys,
            config.cors_origins,
            dashboard=config.dashboard,
            hosts=HostNames(config.host, config.allowed_hosts, config.cors_origins),
            public_metrics=config.public_metrics,
            access_log=config.access_log,
            access_log_salt=config.access_log_salt,
            request_log=request_log(config),
            unknown_fields=config.unknown_fields,
            files=None if config.files_dir is None else FilesFolder(config.files_dir, config.files_quota),
            responses=_response_store(config),
            tracer_provider=None if config.traces_endpoint is None else make_tracer_provider(config.traces_endpoint),
        )
        self._server = UvicornServer(self._app, config.limits, config.certificate, shared=shared)
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
    def num_running(self) -> int:
        """Requests whose responses have not ended."""
        return len(self._server.server_state.tasks)

    @property
    def is_idle(self) -> bool:
        stored: StoredResponses | None = self._app.state.stored
        return not self.num_running and (stored is None or stored.is_idle)

    def stop(self) -> None:
        self._server.should_exit = True


class LocalFrontEnd(HTTPServer):
    """The front end of a server with one HTTP process, which also supervises the engine."""

    def __init__(self, config: ServerConfig, chat_template: str | None, engine: EngineClient, metrics: Metrics) -> None:
        self.engine = engine
        super().__init__(config, make_service(config, engine, metrics, chat_template), config.keys.read())


def load_served_model(config: ServerConfig, chat_template: str | None = None) -> ServedModel:
    """Load what a front end needs of the model: the tokenizer."""
    # The model is downloaded here to show a progress bar.
    path, names = resolve_model(config.model, progress=not config.quiet), (config.model_name, *config.served_names[1:])
    return ServedModel.load(
        path,
        names,
        config.engine,
        tool_format=config.tool_format,
        chat_template=chat_template,
        image_hosts=config.image_hosts,
    )


def make_service(config: ServerConfig, engine: EngineClient, metrics: Metrics, chat_template: str | None) -> Service:
    """Build the front end without HTTP. The application's lifespan starts the engine."""
    return Service.local(
        load_served_model(config, chat_template),
        engine,
        metrics,
        config.limits,
        isolate_keys=config.isolate_keys,
        classes=config.classes,
        policy_switch=config.may_switch_policy(),
        lora_folder=config.lora_folder,
    )


def make_engine(config: ServerConfig, metrics: Metrics) -> EngineClient:
    """Build the client of an engine that is not started yet."""
    return EngineClient(
        str(resolve_model(config.model, progress=not config.quiet)),
        config.engine,
        metrics.record_step,
        metrics.record_restart,
        config.supervision,
        log_level=config.engine_log_level or config.log_level,
        module=config.engine_module,
    )


@asynccontextmanager
async def own_engine(config: ServerConfig) -> AsyncIterator[Send]:
    """Start an engine and handle the requests of a batch as the server does, without a network."""
    metrics = Metrics()
    engine = make_engine(config, metrics)
    app = make_app(make_service(config, engine, metrics, chat_template=None))

    async def require_ready() -> None:
        """Wait until the engine is started or restarted; raise if it failed."""
        if await engine.wait_until_settled() is not EngineState.READY:
            raise EngineDead(f"the engine failed: {engine.problem}")

    async def send(path: str, body: bytes) -> BatchResponse:
        await require_ready()
        return await call(app, path, body)

    try:
        async with app.router.lifespan_context(app):
            await require_ready()
            yield send
    finally:
        await engine.stop()
