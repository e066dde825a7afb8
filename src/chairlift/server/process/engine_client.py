"""The front end's side of the engine process: it starts it, watches it, restarts it, and talks to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import zmq
import zmq.asyncio

from chairlift.core.request import completion_ids
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter, TemporaryFailure
from chairlift.server.process.engine_handle import EngineHandle, spawn
from chairlift.server.process.messages import (
    Cancel,
    FailedToLoad,
    Frame,
    Heartbeat,
    Loaded,
    RecorderFault,
    Refused,
    StepReport,
    Stop,
    Submit,
    SwitchPolicy,
    Update,
    Watch,
    decode_from_engine,
    encode,
)
from chairlift.server.process.stream import Stream, Watcher

log = logging.getLogger("chairlift.server")

GONE = "the engine stopped unexpectedly; the request was not finished"


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # for good: it cannot load, or died too often
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a sick engine is treated."""

    heartbeat_timeout: float = 10.0  # seconds of silence after which it is killed
    loading_silence: float = 300.0  # the same while it loads: libraries and weights can make its heart stand still
    step_timeout: float = 300.0  # seconds that one step may take; a big prefill on a slow CPU takes many
    max_restarts: int = 5  # in a row, without a minute of good health between them
    first_backoff: float = 0.25  # doubled at every restart
    healthy_after: float = 60.0


class EngineClient:
    def __init__(
        self,
        model: str,
        engine_options: dict[str, Any],
        on_report: Callable[[StepReport], None],
        on_restart: Callable[[], None],
        supervision: Supervision | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.state = EngineState.STARTING
        self.loaded: Loaded | None = None
        self.problem = ""  # why it failed, for people
        self.restarts = 0
        # What is done with those for the dashboard.
        self.on_frame: Callable[[Frame | RecorderFault], None] = lambda frame: None
        self._model = model
        self._options = engine_options
        self._quiet = quiet
        self._on_report = on_report
        self._on_restart = on_restart
        self._care = supervision or Supervision()
        self._context = zmq.asyncio.Context()
        self._streams: dict[str, Stream] = {}  # by completion id
        self._life: EngineHandle | None = None
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Sequences that the engine was given and has not finished."""
        return sum(stream.sequences[one_id] for one_id, stream in self._streams.items())

    @property
    def pid(self) -> int | None:
        return self._life.process.pid if self._life else None

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_until_settled(self) -> EngineState:
        """Wait until the engine is ready, or certain not to be."""
        while self.state in (EngineState.STARTING, EngineState.RESTARTING):
            self._changed.clear()
            await self._changed.wait()
        return self.state

    def submit(self, requests: Sequence[Submit], watcher: Watcher | None = None) -> Stream:
        """Send all prompts of one HTTP request; what comes of them arrives on one stream."""
        if self.state is not EngineState.READY:
            raise EngineDead(f"the engine is {self.state.value}")
        messages = [encode(request) for request in requests]  # if one cannot be told, nothing has happened yet
        ids = [one_id for request in requests for one_id in completion_ids(request.request_id, request.params.n)]
        # Those of which nothing will be heard are over when the first completion is: all of a search end together.
        sequences = {one.request_id: 1 + one.params.num_sequences - one.params.n for one in requests}
        stream = Stream(ids, watcher, sequences)
        self._streams.update(dict.fromkeys(stream.ids, stream))
        for message in messages:
            self._send(message)
        return stream

    def tell(self, message: Watch | SwitchPolicy) -> bool:
        """Something that is about no request. False if there is no engine to hear it at the moment."""
        listens = self._life is not None and self.state is EngineState.READY
        if listens:
            self._send(encode(message))
        return listens

    def cancel(self, stream: Stream) -> None:
        """End what is still running of a stream; nothing more will be heard of it. Does not wait, so that it can
        be called while the caller itself is being cancelled."""
        self._end(stream, "cancelled")

    def _end(self, stream: Stream, reason: str, error: Exception | None = None) -> None:
        ids = stream.end(reason, error)
        for request_id in stream.ids:
            self._streams.pop(request_id, None)
        if ids and self._life is not None and self.state is EngineState.READY:
            self._send(encode(Cancel(ids)))

    def nudge_streams(self) -> None:
        for stream in set(self._streams.values()):
            stream.nudge()

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop the engine, by force if it does not listen, and wait until the process is gone."""
        listens = self.state is EngineState.READY  # while it loads, it does not
        self._become(EngineState.STOPPED)
        self._fail_all(EngineDead("the server is shutting down"))
        if self._life is not None and listens:
            self._send(encode(Stop()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._life.process.wait(), timeout)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self._context.destroy(linger=0)

    def _send(self, message: bytes) -> None:
        """Never waits: a process that has just died takes nothing, and a caller must not be stuck with it."""
        assert self._life is not None
        self._life.commands.send(message)

    def _become(self, state: EngineState) -> None:
        self.state = state
        self._changed.set()

    # ---- the life of the engine process --------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while self.state is not EngineState.STOPPED:
            healthy = False
            try:
                healthy = await self._live()
            except (OSError, zmq.ZMQError) as error:  # out of file descriptors, or of memory: it may get better
                log.error("the engine cannot be started: %s", error)
            finally:
                self._fail_all(EngineDead(GONE))
            if self.state in (EngineState.STOPPED, EngineState.FAILED):
                return
            if healthy:
                self.restarts = 0
            self.restarts += 1
            if self.restarts > self._care.max_restarts:
                self.problem = f"it died {self.restarts} times in a row. {self.problem}".rstrip()
                log.error("the engine is not started again: %s", self.problem)
                self._become(EngineState.FAILED)
                return
            self._become(EngineState.RESTARTING)
            pause = self._care.first_backoff * 2 ** (self.restarts - 1)
            log.warning("the engine died; starting it again in %.2f s (restart %d)", pause, self.restarts)
            await asyncio.sleep(pause)
            self._on_restart()

    async def _live(self) -> bool:
        """Start the process and listen to it until it ends or hangs. Returns whether it was well for a while."""
        life = self._life = await spawn(self._context, self._model, self._options, quiet=self._quiet)
        listener = asyncio.create_task(self._listen(life))
        ended = asyncio.create_task(life.process.wait())
        try:
            while not ended.done():
                await self._watch(life, {ended, listener})
                problem = "cannot be understood" if listener.done() else self._illness(life)
                if problem:
                    log.error("the engine %s: killing it", problem)
                    life.process.kill()
                    await ended
            await self._hear_last_words(listener)
            return life.ready_at is not None and time.monotonic() - life.ready_at > self._care.healthy_after
        finally:
            listener.cancel()
            if life.process.returncode is None:
                life.process.kill()
                await life.process.wait()
            self._life = None
            life.close()

    async def _watch(self, life: EngineHandle, tasks: set[asyncio.Task[Any]]) -> None:
        tick, now = min(1.0, self._care.heartbeat_timeout / 4), time.monotonic()
        await asyncio.wait(tasks, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
        if time.monotonic() - now > 2 * tick:
            life.last_sign = time.monotonic()  # it was this process that slept: signs of life may be waiting

    def _illness(self, life: EngineHandle) -> str | None:
        patience = self._care.loading_silence if life.ready_at is None else self._care.heartbeat_timeout
        if time.monotonic() - life.last_sign > patience:
            return f"has been silent for {patience:g} s"
        if life.turn_seconds > self._care.step_timeout:
            return f"has been in one step for more than {self._care.step_timeout:g} s"
        return None

    async def _hear_last_words(self, listener: asyncio.Task[None]) -> None:
        """Messages that the process sent before it ended may still be under way."""
        await asyncio.wait([listener], timeout=0.2)

    async def _listen(self, life: EngineHandle) -> None:
        while True:
            message = decode_from_engine(await life.reports.recv())
            life.last_sign = time.monotonic()
            match message:
                case StepReport():
                    self._on_report(message)
                    for update in message.updates:
                        self._deliver(update)
                case Loaded():
                    self.loaded, life.ready_at = message, time.monotonic()
                    if self.state is not EngineState.STOPPED:
                        self._become(EngineState.READY)
                case FailedToLoad():
                    self.problem = message.problem
                    if self.loaded is None:  # a model that could be loaded before is worth another try
                        self._become(EngineState.FAILED)
                case Refused():
                    stream = self._streams.get(message.request_id)
                    if stream is not None:
                        # With it end the other prompts of the same HTTP request.
                        self._end(stream, "refused", _error(message))
                case Frame() | RecorderFault():
                    self.on_frame(message)
                case Heartbeat():
                    life.turn_seconds = message.turn_seconds

    def _deliver(self, update: Update) -> None:
        stream = self._streams.get(update.request_id)
        if stream is None:
            return  # cancelled meanwhile
        stream.push(update)
        if update.finish_reason is not None:
            del self._streams[update.request_id]

    def _fail_all(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            stream.end("error", error)
        self._streams.clear()


def _error(refused: Refused) -> ChairliftError:
    if refused.parameter is None:
        return TemporaryFailure(refused.problem)
    return InvalidParameter(refused.parameter, refused.problem)
