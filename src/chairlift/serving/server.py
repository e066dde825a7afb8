"""Running the server: signals, draining, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.store import resolve_model
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.serving.admission import Limits
from chairlift.serving.app import make_app
from chairlift.serving.engine_client import EngineClient, EngineState, Supervision
from chairlift.serving.metrics import Metrics
from chairlift.serving.service import Service

log = logging.getLogger("chairlift.server")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model: str
    served_name: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)  # options of EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    drain_timeout: float = 30.0
    limits: Limits = field(default_factory=Limits)
    supervision: Supervision = field(default_factory=Supervision)
    tool_format: str | None = None  # how the model writes tool calls; None: as its chat template shows
    quiet: bool = False


async def serve_forever(config: ServerConfig, on_ready: Callable[[Service], None] = lambda service: None) -> int:
    """Serve until told to stop. Returns the exit status: 0 after an orderly end, 1 if the engine failed for good."""
    resolve_model(config.model, progress=not config.quiet)  # whatever is wrong with it is said first
    listener = _listen(config.host, config.port)
    service = make_service(config)
    app = make_app(service, config.api_keys)
    server = _Server(
        uvicorn.Config(
            app, config.host, config.port, log_level="warning", access_log=False, timeout_graceful_shutdown=2
        )
    )
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        return await _run(config, service, serving, stopping, on_ready)
    finally:
        server.should_exit = True
        await service.engine.stop()
        await serving


def make_service(config: ServerConfig) -> Service:
    """All of the front end but HTTP. The engine is started with the application that serves it."""
    # The front end only needs the tokenizer; fetching the model here, once, shows its progress bar.
    path = resolve_model(config.model, progress=not config.quiet)
    tokenizer = make_tokenizer(open_checkpoint(path))
    metrics = Metrics()
    engine = EngineClient(
        str(path), config.engine, metrics.take_in, metrics.note_restart, config.supervision, quiet=config.quiet
    )
    name = config.served_name or config.model
    return Service(name, tokenizer, engine, metrics, config.limits, config.tool_format)


def _listen(host: str, port: int) -> socket.socket:
    """Before the engine is started: a port that is taken should not cost the time of loading a model."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        raise InvalidParameter("port", problem) from None


async def _run(
    config: ServerConfig,
    service: Service,
    serving: asyncio.Task[None],
    stopping: asyncio.Event,
    on_ready: Callable[[Service], None],
) -> int:
    told = asyncio.create_task(stopping.wait())
    settled = asyncio.create_task(service.engine.wait_until_settled())
    await asyncio.wait({told, settled, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return 1
    if settled.done() and settled.result() is EngineState.READY:
        on_ready(service)
    while not told.done() and not serving.done():
        if service.engine.state is EngineState.FAILED:
            log.error("the engine failed: %s", service.engine.problem)
            return 1
        await asyncio.wait({told, serving}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    await _drain(service, config.drain_timeout)
    return 0


async def _drain(service: Service, timeout: float) -> None:
    """Take no more requests, and let those that run finish."""
    service.admission.draining = True
    deadline = asyncio.get_running_loop().time() + timeout
    while service.engine.num_open and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        """Signals are ours: uvicorn would stop at once instead of draining."""
        return nullcontext()
