"""A worker: an HTTP process whose engine is the hub's.

The hub starts it as `python -m chairlift.server.workers.worker`, with the file descriptors of their channel and of the
listening socket. It exits when the hub tells it to, or when the hub has exited.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, TypeVar

from chairlift.core.events import completion_ids
from chairlift.errors import EngineDead
from chairlift.server.access import Allowance, APIKey
from chairlift.server.config import decode_config
from chairlift.server.front_end import HTTPServer, load_served_model
from chairlift.server.generation.admission import Admission
from chairlift.server.http.routes import Service
from chairlift.server.metrics import Metrics, MetricSample
from chairlift.server.process.engine_client import EngineState
from chairlift.server.process.streams import UpdateObserver, UpdateStream
from chairlift.server.process.this_process import die_with_parent
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import DashboardFrame, EngineCommand, Loaded, RecorderFault, Submit, Update
from chairlift.server.workers.channel import Channel, ForHub, ForWorker, Text, WireError

Result = TypeVar("Result")


class RemoteEngine:
    """The engine as a worker sees it: requests go to the hub, which submits them."""

    def __init__(self, channel: Channel) -> None:
        self.state = EngineState.STARTING
        self.loaded: Loaded | None = None
        self.num_open = 0  # The whole server's, when the hub last said so.
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
        self._channel.tell(ForHub.submit, list(requests))
        self._streams.update(dict.fromkeys(ids, stream))
        return stream

    def cancel(self, stream: UpdateStream) -> None:
        if self._end(stream, "cancelled"):
            self._channel.tell(ForHub.cancel, stream.ids[0])

    def send(self, command: EngineCommand) -> bool:
        ready = self.state is EngineState.READY
        if ready:
            self._channel.tell(ForHub.command, command)
        return ready

    def ping_streams(self) -> None:
        for stream in set(self._streams.values()):
            stream.ping()

    def deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None:
                stream.push(update)
                if update.finish_reason is not None:
                    del self._streams[update.request_id]

    def end_stream(self, request_id: str, reason: str, error: WireError | None) -> None:
        ended = next((one for one in self._streams.values() if one.ids[0] == request_id), None)
        if ended is not None:
            self._end(ended, reason, None if error is None else error.exception())

    def _end(self, stream: UpdateStream, reason: str, error: Exception | None = None) -> list[str]:
        ended = stream.end(reason, error)
        for one_id in stream.ids:
            self._streams.pop(one_id, None)
        return ended


class Grants:
    """What the hub grants to the requests of this worker, by numbers: reservations, and requests of limited keys."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.numbers = itertools.count()

    async def ask(
        self, method: Callable[Concatenate[Any, int, ...], Coroutine[Any, Any, Result]], number: int, *arguments: Any
    ) -> Result:
        """Ask for what is then granted by this number. It is released if the request ends meanwhile."""
        asking = asyncio.ensure_future(self._channel.ask(method, number, *arguments))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda _: self.release(number))
            raise

    def release(self, number: int, unused: int = 0) -> None:
        self._channel.tell(ForHub.release, number, unused)

    async def begin(self, key: APIKey) -> Allowance:
        number = next(self.numbers)
        return Allowance(self, key, await self.ask(ForHub.begin, number, key), number)

    async def charge(self, allowance: Allowance, tokens: int) -> None:
        allowance.headers = await self._channel.ask(ForHub.charge, allowance.number, tokens)

    def end(self, allowance: Allowance, unused: int) -> None:
        self.release(allowance.number, unused)


class RemoteAdmission(Admission):
    """Asks the hub, which knows the requests of all workers."""

    def __init__(self, grants: Grants, engine: RemoteEngine, metrics: Metrics, limits: Limits) -> None:
        super().__init__(metrics, limits)
        self._grants = grants
        self._engine = engine
        self._scopes: dict[int, asyncio.Timeout] = {}  # The key is the reservation's number.

    @asynccontextmanager
    async def reserve(self, num_prompts: int, n: int, tenant: str) -> AsyncIterator[Loaded]:
        self._check_not_draining()
        number = next(self._grants.numbers)
        scope = self._scopes[number] = asyncio.timeout(None)
        try:
            async with self._until_displaced(scope):  # The hub may displace it as soon as it has granted it.
                await self._grants.ask(ForHub.reserve, number, num_prompts, n, tenant)
                if self._engine.loaded is None:
                    raise EngineDead("the engine is starting")
                yield self._engine.loaded
        finally:
            del self._scopes[number]
            self._grants.release(number)

    def displace(self, number: int) -> None:
        if (scope := self._scopes.get(number)) is not None:
            scope.reschedule(0.0)


class WorkerMetrics(Metrics):
    """The metrics of one worker; what it shows are those of the whole server."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self.totals: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        return self.totals

    async def exposition(self) -> bytes:
        return await self._channel.ask(ForHub.exposition)


class Worker(ForWorker):
    def __init__(self, channel: Channel, listener: socket.socket) -> None:
        self._channel = channel
        self._listener = listener

    async def run(self) -> None:
        """Serve until the hub exits or stops this worker."""
        await self._channel.serve(self, ForWorker)
        self._http.stop()
        await self._serving

    def configure(self, config: bytes, chat_template: str | None, keys: list[APIKey]) -> None:
        settings, grants = decode_config(config), Grants(self._channel)
        logging.getLogger("chairlift").setLevel(settings.log_level.upper())
        self._engine = RemoteEngine(self._channel)
        self._metrics = WorkerMetrics(self._channel)
        self._admission = RemoteAdmission(grants, self._engine, self._metrics, settings.limits)
        service = Service(
            load_served_model(settings, chat_template),
            self._engine,
            self._metrics,
            settings.limits,
            self._admission,
            rate_limits=grants,
            isolate_keys=settings.isolate_keys,
            classes=settings.classes,
            policy_switch=settings.may_switch_policy(),
        )
        self._pages = service.subscribers
        self._pages.find_elsewhere = lambda request_id, key: self._channel.ask(ForHub.find_text, request_id, key)
        self._http = HTTPServer(settings, service, keys, shared=True)
        self._serving = asyncio.create_task(self._http.serve(self._listener))
        self._serving.add_done_callback(lambda _: self._channel.close())
        self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        await self._http.wait_until_listening()
        self._channel.tell(ForHub.listening)

    # ---- calls of the hub ------------------------------------------------------------------------------------------

    def set_engine(self, state: str, loaded: Loaded | None) -> None:
        self._engine.state, self._engine.loaded = EngineState(state), loaded

    def deliver(self, updates: list[Update]) -> None:
        self._engine.deliver(updates)

    def end_stream(self, request_id: str, reason: str, error: WireError | None) -> None:
        self._engine.end_stream(request_id, reason, error)

    def displace(self, number: int) -> None:
        self._admission.displace(number)

    def reload(self, keys: list[APIKey]) -> None:
        self._http.reload(keys)

    def set_totals(self, values: dict[str, float], num_open: int) -> None:
        self._metrics.totals, self._engine.num_open = values, num_open

    def watch(self, on: bool) -> None:
        self._pages.set_watched_elsewhere(on)

    def show(self, frame: DashboardFrame | RecorderFault) -> None:
        self._engine.on_frame(frame)

    def shut_down(self, drain: bool) -> None:
        if drain:
            self._http.drain()
            self._draining = asyncio.create_task(self._stop_when_idle())
        else:
            self._http.stop()

    async def _stop_when_idle(self) -> None:
        while not self._http.is_idle:
            await asyncio.sleep(0.05)
        self._http.stop()

    async def samples(self) -> list[MetricSample]:
        return self._metrics.samples()

    async def find_text(self, request_id: str, key: bytes | None) -> Text | None:
        return self._pages.texts.find(request_id, key)


async def _run(channel: int, listener: int) -> None:
    await Worker(await Channel.open(socket.socket(fileno=channel)), socket.socket(fileno=listener)).run()


def main() -> None:
    channel, listener, hub = map(int, sys.argv[1:])
    die_with_parent(hub)
    # They reach the whole process group; the hub handles them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    asyncio.run(_run(channel, listener))


if __name__ == "__main__":
    main()
