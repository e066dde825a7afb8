"""A worker's view of what the hub owns: the engine, admission, the limits of keys, and the metrics."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chairlift.core.request import completion_ids
from chairlift.errors import EngineDead
from chairlift.server.access import APIKey, Grant
from chairlift.server.generation.admission import Admission
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineState
from chairlift.server.process.streams import UpdateObserver, UpdateStream
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import DashboardFrame, Loaded, RecorderFault, RecordSteps, Submit, SwitchPolicy
from chairlift.server.workers.messages import (
    BeginRequest,
    CancelStream,
    Channel,
    ChargeTokens,
    Displaced,
    EndRequest,
    EngineStatus,
    Release,
    Reply,
    Reserve,
    Scrape,
    StreamEnded,
    SubmitAll,
    ToHub,
    Totals,
    ToWorker,
    Updates,
)

HubChannel = Channel[ToWorker, ToHub]


class HubCalls:
    """Calls of the hub that return a result."""

    def __init__(self, channel: HubChannel) -> None:
        self.channel = channel
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def call(self, message: Callable[[int], ToHub]) -> tuple[int, Any]:
        """Send the message that `message` makes with the number of the call; return the number and the result."""
        number = next(self._numbers)
        result = self._open[number] = asyncio.get_running_loop().create_future()
        self.channel.send(message(number))
        try:
            return number, await result
        except asyncio.CancelledError:
            self.channel.send(Release(number))  # the hub may have granted it
            raise
        finally:
            del self._open[number]

    def on_reply(self, reply: Reply) -> None:
        result = self._open.get(reply.call)
        if result is None or result.done():
            return
        if reply.error is not None:
            result.set_exception(reply.error.exception())
        else:
            result.set_result(reply.value)


class RemoteEngine:
    """The engine as a worker sees it: requests go to the hub, which submits them."""

    def __init__(self, channel: HubChannel) -> None:
        self.state = EngineState.STARTING
        self.loaded: Loaded | None = None
        self.num_open = 0  # The whole server's, when the last Totals were sent.
        self.on_frame: Callable[[DashboardFrame | RecorderFault], None] = lambda frame: None
        self._channel = channel
        self._streams: dict[str, UpdateStream] = {}  # The key is the completion's id.

    async def start(self) -> None:
        """The hub has started the engine."""

    def submit(self, requests: Sequence[Submit], observer: UpdateObserver | None = None) -> UpdateStream:
        if self.state is not EngineState.READY:
            raise EngineDead(f"the engine is {self.state.value}")
        ids = [one_id for request in requests for one_id in completion_ids(request.request_id, request.params.n)]
        stream = UpdateStream(ids, observer)
        self._channel.send(SubmitAll(list(requests)))
        self._streams.update(dict.fromkeys(ids, stream))
        return stream

    def cancel(self, stream: UpdateStream) -> None:
        if self._end(stream, "cancelled"):
            self._channel.send(CancelStream(stream.ids[0]))

    def send(self, message: RecordSteps | SwitchPolicy) -> bool:
        ready = self.state is EngineState.READY
        if ready:
            self._channel.send(message)
        return ready

    def ping_streams(self) -> None:
        for stream in set(self._streams.values()):
            stream.ping()

    def receive(self, message: EngineStatus | Updates | StreamEnded | Totals) -> None:
        match message:
            case Updates(updates):
                for update in updates:
                    stream = self._streams.get(update.request_id)
                    if stream is not None:
                        stream.push(update)
                        if update.finish_reason is not None:
                            del self._streams[update.request_id]
            case StreamEnded(request_id, reason, error):
                ended = next((one for one in self._streams.values() if one.ids[0] == request_id), None)
                if ended is not None:
                    self._end(ended, reason, None if error is None else error.exception())
            case EngineStatus(state, loaded):
                self.state, self.loaded = EngineState(state), loaded
            case Totals(num_open=num_open):
                self.num_open = num_open

    def _end(self, stream: UpdateStream, reason: str, error: Exception | None = None) -> list[str]:
        ended = stream.end(reason, error)
        for one_id in stream.ids:
            self._streams.pop(one_id, None)
        return ended


class RemoteAdmission(Admission):
    """Asks the hub, which knows the requests of all workers."""

    def __init__(self, hub: HubCalls, engine: RemoteEngine, metrics: Metrics, limits: Limits) -> None:
        super().__init__(metrics, limits)
        self._hub = hub
        self._engine = engine
        self._scopes: dict[int, asyncio.Timeout] = {}  # The key is the number of the call.

    @asynccontextmanager
    async def reserve(self, num_prompts: int, n: int, tenant: str) -> AsyncIterator[Loaded]:
        self._check_not_draining()
        number, _ = await self._hub.call(lambda call: Reserve(call, num_prompts, n, tenant))
        scope = self._scopes[number] = asyncio.timeout(None)
        try:
            if self._engine.loaded is None:
                raise EngineDead("the engine is starting")
            async with self._until_displaced(scope):
                yield self._engine.loaded
        finally:
            del self._scopes[number]
            self._hub.channel.send(Release(number))

    def on_displaced(self, message: Displaced) -> None:
        if (scope := self._scopes.get(message.call)) is not None:
            scope.reschedule(0.0)


class RemoteRateLimits:
    """Asks the hub, which counts the requests of all workers."""

    def __init__(self, hub: HubCalls) -> None:
        self._hub = hub

    async def begin(self, key: APIKey) -> Grant:
        number, headers = await self._hub.call(lambda call: BeginRequest(call, key))
        return Grant(key, headers, number)

    async def charge(self, grant: Grant, tokens: int) -> None:
        _, grant.headers = await self._hub.call(lambda call: ChargeTokens(call, grant.number, tokens))

    def end(self, grant: Grant, unused: int) -> None:
        self._hub.channel.send(EndRequest(grant.number, unused))


class WorkerMetrics(Metrics):
    """The metrics of one worker; what it shows are those of the whole server."""

    def __init__(self, hub: HubCalls) -> None:
        super().__init__()
        self._hub = hub
        self.totals: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        return self.totals

    async def exposition(self) -> bytes:
        text: bytes
        _, text = await self._hub.call(Scrape)
        return text
