"""Runs the server: startup, signals, draining and shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from dataclasses import replace
from functools import partial

from chairlift.errors import EngineDead, InvalidParameter
from chairlift.loading.request_defaults import read_chat_template
from chairlift.loading.resolve import resolve_model
from chairlift.machine.files import connection_limit, raise_file_limit
from chairlift.machine.hardware import check_device
from chairlift.server.access import warn_of_short_keys
from chairlift.server.config import ServerConfig
from chairlift.server.front_end import LocalFrontEnd, make_engine
from chairlift.server.http.boundary import check_traces_endpoint, open_access_log
from chairlift.server.http.guards import HostNames
from chairlift.server.http.listener import listen, listening_address
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState, remove_stale_folders
from chairlift.server.process.running import ServerStatus, announced
from chairlift.server.wire.messages import Loaded, Loading
from chairlift.server.workers.hub import WorkerPool
from chairlift.text.reasoning_formats.base import recognised_reasoning

log = logging.getLogger("chairlift.server")

FrontEnd = LocalFrontEnd | WorkerPool


class ServerEvents:
    """What a server tells while it runs; this one ignores all of it."""

    def loading(self, stage: Loading) -> None:
        """The engine starts: called again and again."""

    def ready(self, address: str, loaded: Loaded) -> None:
        """Requests are answered at this address."""

    def draining(self, running: int) -> None:
        """The server ends once this many requests have; called again and again."""

    def ended(self, running: int) -> None:
        """The server ends; this many requests are cut off."""


async def serve_forever(config: ServerConfig, events: ServerEvents | None = None) -> int:
    """Serve until a signal arrives.

    Returns the exit status: 0 after draining, 1 if the engine failed permanently, and 128 plus the signal's number if a
    second signal cut the draining short. Raises if the engine cannot start.
    """
    events = events or ServerEvents()
    raise_file_limit()
    connection_limit(config.limits.max_connections)  # raises if there can be too few
    if config.access_log is not None:
        open_access_log(config.access_log).close()
    warn_of_short_keys(config.keys.read())
    check_device(config.engine.get("device", "auto"))
    remove_stale_folders()
    resolve_model(config.model, progress=not config.quiet)  # first, so that errors are reported at once
    HostNames(config.host, config.allowed_hosts)  # raises for invalid names
    template = read_chat_template(config.engine.get("chat_template"))
    if template is not None:
        # A restarted engine does not depend on the file: all that it needs of the template is the kind of reasoning.
        reasoning = config.engine.get("reasoning_parser") or recognised_reasoning(template)
        config = replace(config, engine={**config.engine, "chat_template": None, "reasoning_parser": reasoning})
    if config.certificate is not None:
        config.certificate.check()
    if config.traces_endpoint is not None:
        check_traces_endpoint(config.traces_endpoint)
    listener = listen(config.host, config.port, config.uds)
    signals = _Signals()  # The engine's process does not exist yet, so that a signal never leaves it behind.
    address = listening_address(listener, config.host, secure=config.certificate is not None)
    metrics = Metrics(config.model_name)
    engine = make_engine(config, metrics)
    engine.on_loading = events.loading
    async with announced(partial(_status, config, address, time.time(), engine, metrics, signals), signals.stop):
        front_end = await _start_front_end(config, template, engine, metrics)
        return await _serve(config, front_end, listener, signals, address, events)


async def _serve(
    config: ServerConfig,
    front_end: FrontEnd,
    listener: socket.socket,
    signals: _Signals,
    address: str,
    events: ServerEvents,
) -> int:
    _reload_on_hangup(config, front_end)
    serving = asyncio.create_task(front_end.serve(listener))
    try:
        return await _run(config, front_end, serving, signals, address, events)
    finally:
        # Before the server exits, so that unfinished requests get an error response.
        await front_end.engine.stop(timeout=0.0 if signals.second else 5.0)
        front_end.stop()
        await serving
        if config.uds is not None:
            config.uds.unlink(missing_ok=True)


def _status(
    config: ServerConfig, address: str, started: float, engine: EngineClient, metrics: Metrics, signals: _Signals
) -> ServerStatus:
    """What `chairlift ps` shows."""
    return ServerStatus(
        model=config.model_name,
        names=(*config.served_names, config.model),
        address=address,
        started=started,
        state="draining" if signals.first.is_set() else engine.state.value,
        running=metrics.value(metrics.running),
        waiting=metrics.value(metrics.waiting),
        open=engine.num_open,
        drain_seconds=config.drain_timeout,
    )


async def _start_front_end(
    config: ServerConfig, template: str | None, engine: EngineClient, metrics: Metrics
) -> FrontEnd:
    """Start the engine's process, which imports torch while this one builds its front end."""
    await engine.start()
    try:
        return (LocalFrontEnd if config.api_workers == 1 else WorkerPool)(config, template, engine, metrics)
    except BaseException:
        await engine.stop(timeout=0.0)
        raise


async def _run(
    config: ServerConfig,
    front_end: FrontEnd,
    serving: asyncio.Task[None],
    signals: _Signals,
    address: str,
    events: ServerEvents,
) -> int:
    signalled = asyncio.create_task(signals.first.wait())
    ready = asyncio.create_task(_wait_until_ready(front_end))
    await asyncio.wait({signalled, ready, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        return 1
    loaded = front_end.engine.loaded
    if ready.done() and ready.result() is EngineState.READY and loaded is not None:
        events.ready(address, loaded)
    while not signalled.done() and not serving.done():
        if front_end.engine.state is EngineState.FAILED:
            engine = front_end.engine
            if engine.loaded is not None:
                log.error("the engine failed: %s", engine.problem)
                return 1
            if engine.bad_parameter is not None:
                raise InvalidParameter(engine.bad_parameter, engine.problem)
            raise EngineDead(f"the engine cannot start: {engine.problem}")
        await asyncio.wait({signalled, serving}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    if not signalled.done():
        return 1
    front_end.drain()  # refuses new requests, while those in flight may finish
    deadline = asyncio.get_running_loop().time() + config.drain_timeout
    while not front_end.is_idle and not signals.second and asyncio.get_running_loop().time() < deadline:
        events.draining(front_end.num_running)
        await asyncio.sleep(0.05)
    events.ended(front_end.num_running)
    return 128 + signals.second if signals.second else 0


async def _wait_until_ready(front_end: FrontEnd) -> EngineState:
    state = await front_end.engine.wait_until_settled()
    if state is EngineState.READY:
        await front_end.wait_until_listening()
    return state


class _Signals:
    """SIGTERM and SIGINT: the first one starts draining, the second one ends it."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = 0  # the number of the second signal
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def stop(self, now: bool) -> None:
        """Do what SIGTERM does, however often; `now` also ends the draining."""
        self.first.set()
        if now:
            self.second = signal.SIGTERM

    def _on_signal(self, number: int) -> None:
        if self.first.is_set():
            self.second = number
        self.first.set()


def _reload_on_hangup(config: ServerConfig, front_end: FrontEnd) -> None:
    """Read the key file and the certificate again on SIGHUP. Without them the signal ends the server, as usual."""

    def reload() -> None:
        try:
            keys = config.keys.read()
            if config.certificate is not None:
                config.certificate.check()
        except InvalidParameter as error:
            log.error("nothing is changed, because a file cannot be used: %s", error)
            return
        warn_of_short_keys(keys)
        front_end.reload(keys)
        log.info("the API keys and the certificate were read again")

    if config.keys.file is not None or config.certificate is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
