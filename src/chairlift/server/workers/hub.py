"""The hub: starts the workers, relays between them and the engine, and decides for all of them together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from chairlift.server.access import Allowance, APIKey, RateLimiter
from chairlift.server.config import ServerConfig, encode_config
from chairlift.server.generation.admission import AdmissionControl, Reservation
from chairlift.server.metrics import Metrics, MetricSample, sum_samples
from chairlift.server.process.engine_client import EngineClient
from chairlift.server.process.streams import UpdateStream
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import DashboardFrame, EngineCommand, RecorderFault, RecordSteps, Submit, Update
from chairlift.server.workers.channel import Channel, ForHub, ForWorker, Text, WireError

log = logging.getLogger("chairlift.server")

ANSWER_SECONDS = 1.0  # time limit for an answer of a busy worker; without its metrics, its last ones count
TOTALS_SECONDS = 1.0  # The dashboard gets the metrics this often.
MAX_EARLY_DEATHS = 3  # So many workers in a row may die within EARLY_SECONDS.
EARLY_SECONDS = 10.0
STOP_SECONDS = 5.0  # A worker that has not exited by then is killed.


class Hub:
    def __init__(self, engine: EngineClient, metrics: Metrics, limits: Limits) -> None:
        self.engine = engine
        self.metrics = metrics
        self.admission = AdmissionControl(engine, metrics, limits)
        self.rate_limits = RateLimiter(metrics)
        self.links: set[WorkerLink] = set()
        self._retired: list[MetricSample] = []  # the sums of workers that have exited
        self._watching = False  # whether any worker has an open dashboard page
        metrics.watch_engine(engine)
        metrics.other_samples = lambda: chain(self._retired, *(link.samples for link in self.links))
        engine.on_state = self._announce_state
        engine.on_frame = self._pass_on

    def _announce_state(self) -> None:
        for link in self.links:
            link.send_engine()

    def _pass_on(self, frame: DashboardFrame | RecorderFault) -> None:
        for link in self.links:
            if link.is_watching:
                link.channel.tell(ForWorker.show, frame)

    def retire(self, link: WorkerLink) -> None:
        """Forget a worker that has exited; its counters still count."""
        self.links.discard(link)
        self._retired = sum_samples([*self._retired, *link.samples])
        link.release_all()

    async def collect_samples(self) -> None:
        """Ask all workers for their metrics."""
        asked = [asyncio.create_task(link.update_samples()) for link in self.links]
        if asked:
            await asyncio.wait(asked, timeout=ANSWER_SECONDS)

    async def run(self) -> None:
        """Collect the metrics of the workers again and again, and send them the sums: for dashboard pages, and for
        batches, which wait while the engine has much to do."""
        while True:
            await asyncio.sleep(TOTALS_SECONDS)
            await self.collect_samples()
            self.update_watching()
            values = self.metrics.values()
            for link in self.links:
                link.channel.tell(ForWorker.set_totals, values, self.engine.num_open)

    def update_watching(self) -> None:
        """Tell all workers when the first dashboard page is opened and when the last one is closed."""
        watching = any(link.is_watching for link in self.links)
        if watching != self._watching:
            self._watching = watching
            for link in self.links:
                link.channel.tell(ForWorker.watch, watching)

    async def find_text(self, asking: WorkerLink, request_id: str, key: bytes | None) -> Text | None:
        """Return the texts of a request from whichever other worker has them."""
        asked = [link.channel.ask(ForWorker.find_text, request_id, key) for link in self.links if link is not asking]
        for answer in asyncio.as_completed(asked, timeout=ANSWER_SECONDS):
            with suppress(TimeoutError, ConnectionError):
                if (found := await answer) is not None:
                    return found
        return None


class WorkerLink(ForHub):
    """What one worker calls and holds."""

    def __init__(self, hub: Hub, channel: Channel) -> None:
        self.channel = channel
        self.is_listening = asyncio.Event()
        self.samples: list[MetricSample] = []
        self._hub = hub
        self._streams: dict[str, UpdateStream] = {}  # The key is the first request of each.
        self._grants: dict[int, Reservation | Allowance] = {}
        self._unsent: list[Update] = []
        self._watching_until = float("-inf")

    @property
    def is_watching(self) -> bool:
        """Whether dashboard pages of this worker are open."""
        return time.monotonic() < self._watching_until

    def send_engine(self) -> None:
        self.channel.tell(ForWorker.set_engine, self._hub.engine.state.value, self._hub.engine.loaded)

    async def update_samples(self) -> None:
        with suppress(ConnectionError):
            self.samples = await self.channel.ask(ForWorker.samples)

    def forward(self, update: Update) -> None:
        """Send an update together with others of the same step."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(update)

    def _flush(self) -> None:
        updates, self._unsent = self._unsent, []
        if updates:
            self.channel.tell(ForWorker.deliver, updates)

    def forget(self, stream: UpdateStream) -> None:
        """Forget a stream whose completions are finished."""
        self._streams.pop(stream.ids[0], None)

    def end_stream(self, stream: UpdateStream, reason: str, error: Exception | None) -> None:
        self._flush()  # the updates before the end
        if self._streams.pop(stream.ids[0], None) is not None:
            shown = None if error is None else WireError.of(error)
            self.channel.tell(ForWorker.end_stream, stream.ids[0], reason, shown)

    def release_all(self) -> None:
        """End all that a worker held that has exited."""
        for stream in list(self._streams.values()):
            self._hub.engine.cancel(stream)
        for number in list(self._grants):
            self.release(number, 0)

    # ---- calls of the worker ---------------------------------------------------------------------------------------

    def listening(self) -> None:
        self.is_listening.set()

    def submit(self, requests: list[Submit]) -> None:
        first = requests[0].request_id
        try:
            self._streams[first] = self._hub.engine.submit(requests, None, partial(RelayStream, self))
        except Exception as error:
            self.channel.tell(ForWorker.end_stream, first, "refused", WireError.of(error))

    def cancel(self, request_id: str) -> None:
        if (stream := self._streams.pop(request_id, None)) is not None:
            self._hub.engine.cancel(stream)

    def command(self, command: EngineCommand) -> None:
        if isinstance(command, RecordSteps):
            self._watching_until = time.monotonic() + command.seconds
            self._hub.update_watching()
        self._hub.engine.send(command)

    async def reserve(self, number: int, num_prompts: int, n: int, tenant: str) -> None:
        on_displaced = partial(self._displace, number)
        self._grants[number] = self._hub.admission.take(num_prompts, n, tenant, on_displaced)

    def _displace(self, number: int) -> None:
        del self._grants[number]
        self.channel.tell(ForWorker.displace, number)

    async def begin(self, number: int, key: APIKey) -> dict[str, str]:
        self._grants[number] = allowance = await self._hub.rate_limits.begin(key)
        return allowance.headers

    async def charge(self, number: int, tokens: int) -> dict[str, str]:
        allowance = self._grants[number]
        assert isinstance(allowance, Allowance)
        await self._hub.rate_limits.charge(allowance, tokens)
        return allowance.headers

    def release(self, number: int, unused: int) -> None:
        grant = self._grants.pop(number, None)
        if isinstance(grant, Reservation):
            self._hub.admission.release(grant)
        elif grant is not None:
            self._hub.rate_limits.end(grant, unused)

    async def exposition(self) -> bytes:
        await self._hub.collect_samples()
        return await self._hub.metrics.exposition()

    async def find_text(self, request_id: str, key: bytes | None) -> Text | None:
        return await self._hub.find_text(self, request_id, key)


class RelayStream(UpdateStream):
    """Forwards updates to a worker instead of keeping them."""

    def __init__(self, link: WorkerLink, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._link = link

    def push(self, update: Update) -> None:
        super().push(update)
        self._pending.clear()
        self._link.forward(update)
        if not self._open:
            self._link.forget(self)

    def end(self, reason: str, error: Exception | None = None) -> list[str]:
        ended = super().end(reason, error)
        self._link.end_stream(self, reason, error)
        return ended


class WorkerPool:
    """The front end of a server with several HTTP processes: starts the workers, and starts them again when they die.

    This process runs the hub and supervises the engine.
    """

    def __init__(self, config: ServerConfig, chat_template: str | None, engine: EngineClient, metrics: Metrics) -> None:
        self.engine = engine
        self._hub = Hub(self.engine, metrics, config.limits)
        self._config = config
        self._chat_template = chat_template
        self._keys = config.keys.read()
        self._stopping = asyncio.Event()
        self._early_deaths = 0
        self._all_listening = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Run the workers until `stop`, or until they die again and again."""
        await self.engine.start()
        running = asyncio.create_task(self._hub.run())
        try:
            await asyncio.gather(*(self._keep_running(listener) for _ in range(self._config.api_workers)))
        finally:
            running.cancel()

    async def wait_until_listening(self) -> None:
        await self._all_listening.wait()

    def reload(self, keys: list[APIKey]) -> None:
        """Replace the keys, and read the certificate again."""
        self._keys = keys
        for link in self._hub.links:
            link.channel.tell(ForWorker.reload, keys)

    def drain(self) -> None:
        self._hub.admission.draining = True
        self._shut_down(drain=True)

    @property
    def num_running(self) -> int:
        """Completions that are not finished."""
        return self.engine.num_open

    @property
    def is_idle(self) -> bool:
        """Whether all workers have exited, as they do once they are drained."""
        return not self._hub.links

    def stop(self) -> None:
        self._shut_down(drain=False)

    def _shut_down(self, *, drain: bool) -> None:
        self._stopping.set()
        for link in self._hub.links:
            link.channel.tell(ForWorker.shut_down, drain)

    async def _keep_running(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._run_worker(listener)
            if self._stopping.is_set():
                return
            self._early_deaths = self._early_deaths + 1 if time.monotonic() - began < EARLY_SECONDS else 0
            if self._early_deaths > MAX_EARLY_DEATHS:
                log.error("an HTTP process exited with status %d; it is not started again", status)
                self.stop()
                return
            self._hub.metrics.worker_restarts.inc()
            log.error("an HTTP process exited with status %d; starting another", status)

    async def _run_worker(self, listener: socket.socket) -> int:
        """Run one worker until it exits; return its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), listener.fileno()]
            command = [sys.executable, "-m", "chairlift.server.workers.worker", *map(str, fds), str(os.getpid())]
            process = await asyncio.create_subprocess_exec(*command, pass_fds=fds)
        channel = await Channel.open(ours)
        link = WorkerLink(self._hub, channel)
        channel.tell(ForWorker.configure, encode_config(self._worker_config()), self._chat_template, self._keys)
        link.send_engine()
        self._hub.links.add(link)
        if self._stopping.is_set():  # the order was sent before this worker was there
            channel.tell(ForWorker.shut_down, False)
        watching = asyncio.create_task(self._watch(link, process))
        try:
            await channel.serve(link, ForHub)
        finally:
            watching.cancel()
            self._hub.retire(link)
            channel.close()
            await _end(process)
        assert process.returncode is not None
        return process.returncode

    async def _watch(self, link: WorkerLink, process: asyncio.subprocess.Process) -> None:
        """Note when all workers listen, and kill a worker that does not answer any more."""
        await link.is_listening.wait()
        links, channel = self._hub.links, link.channel
        if len(links) == self._config.api_workers and all(one.is_listening.is_set() for one in links):
            self._all_listening.set()
        patience = self._config.supervision.heartbeat_timeout
        while True:
            now = time.monotonic()
            await asyncio.sleep(1.0)
            if time.monotonic() - now > 2.0:
                channel.last_message = time.monotonic()  # this process was suspended, so messages may be queued
            elif time.monotonic() - channel.last_message > patience:  # it sends its metrics every second
                log.error("an HTTP process has been silent for %g s: killing it", patience)
                process.kill()
                return

    def _worker_config(self) -> ServerConfig:
        """The configuration of one worker: limits on what a process holds are divided."""
        limits, count = self._config.limits, self._config.api_workers
        limits = replace(
            limits,
            max_text_jobs=max(1, limits.max_text_jobs // count),
            max_held_bytes=limits.max_held_bytes // count,
            max_connections=limits.max_connections and max(1, limits.max_connections // count),
        )
        return replace(self._config, limits=limits)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a worker whose channel has ended; kill it if it does not exit."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    if process.returncode is None:
        process.kill()
        await process.wait()
