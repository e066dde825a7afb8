"""The hub: relays between workers and the engine, and decides for all workers together."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from chairlift.server.access import Grant, RateLimiter
from chairlift.server.generation.admission import AdmissionControl, Reservation
from chairlift.server.metrics import Metrics, MetricSample, sum_samples
from chairlift.server.process.engine_client import EngineClient
from chairlift.server.process.streams import UpdateStream
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import DashboardFrame, RecorderFault, RecordSteps, Submit, SwitchPolicy, Update
from chairlift.server.workers.messages import (
    AskText,
    BeginRequest,
    CancelStream,
    Channel,
    ChargeTokens,
    Displaced,
    EndRequest,
    EngineStatus,
    FindText,
    Listening,
    Release,
    Reply,
    Reserve,
    Samples,
    Scrape,
    SendSamples,
    SetWatching,
    StreamEnded,
    SubmitAll,
    TextFound,
    ToHub,
    Totals,
    ToWorker,
    Updates,
    WireError,
)

SAMPLES_SECONDS = 1.0  # time limit for the metrics of a busy worker; then its last ones count
TOTALS_SECONDS = 1.0  # The dashboard gets Totals this often.


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
        metrics.other_samples = self._worker_samples
        engine.on_state = self._announce_state
        engine.on_frame = self._pass_on

    def _announce_state(self) -> None:
        for link in self.links:
            link.send_status()

    def _pass_on(self, frame: DashboardFrame | RecorderFault) -> None:
        for link in self.links:
            if link.is_watching:
                link.send(frame)

    async def retire(self, link: WorkerLink) -> None:
        """Forget a worker that has exited; its counters still count."""
        self.links.discard(link)
        self._retired = sum_samples([*self._retired, *link.samples])
        await link.release_all()

    def _worker_samples(self) -> Iterable[MetricSample]:
        yield from self._retired
        for link in self.links:
            yield from link.samples

    async def collect_samples(self) -> None:
        """Ask all workers for their metrics."""
        waiting = [link.request_samples() for link in self.links]
        if waiting:
            await asyncio.wait(waiting, timeout=SAMPLES_SECONDS)

    async def run(self) -> None:
        """Collect the metrics of the workers again and again, and send them the sums: for dashboard pages, and for
        batches, which wait while the engine has much to do."""
        while True:
            await asyncio.sleep(TOTALS_SECONDS)
            await self.collect_samples()
            self.update_watching()
            totals = Totals(self.metrics.values(), self.engine.num_open)
            for link in self.links:
                link.send(totals)

    def update_watching(self) -> None:
        """Tell all workers when the first dashboard page is opened and when the last one is closed."""
        watching = any(link.is_watching for link in self.links)
        if watching != self._watching:
            self._watching = watching
            for link in self.links:
                link.send(SetWatching(watching))

    async def find_text(self, asking: WorkerLink, request_id: str, key: bytes | None) -> dict[str, str | bool] | None:
        """Return the texts of a request from whichever other worker has them."""
        asked = [link.ask_text(request_id, key) for link in self.links if link is not asking]
        for answer in asyncio.as_completed(asked, timeout=SAMPLES_SECONDS):
            with suppress(TimeoutError):
                if (found := await answer) is not None:
                    return found
        return None


class WorkerLink:
    """The hub's end of the channel to one worker, with what the worker holds."""

    def __init__(self, hub: Hub, channel: Channel[ToHub, ToWorker]) -> None:
        self.listening = asyncio.Event()
        self.samples: list[MetricSample] = []
        self._hub = hub
        self._channel = channel
        self._streams: dict[str, UpdateStream] = {}  # The key is the first request of each.
        self._reservations: dict[int, Reservation] = {}  # The key is the number of the call.
        self._grants: dict[int, Grant] = {}  # The key is the number of the call.
        self._unsent: list[Update] = []
        self._samples_wanted: asyncio.Future[None] | None = None
        self._text_calls: dict[int, asyncio.Future[dict[str, str | bool] | None]] = {}
        self._text_numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()  # answers that need messages of other workers
        self.last_message = time.monotonic()
        self._watching_until = float("-inf")

    @property
    def is_watching(self) -> bool:
        """Whether dashboard pages of this worker are open."""
        return time.monotonic() < self._watching_until

    def send(self, message: ToWorker) -> None:
        self._channel.send(message)

    def send_status(self) -> None:
        self.send(EngineStatus(self._hub.engine.state.value, self._hub.engine.loaded))

    def forward(self, update: Update) -> None:
        """Send an update together with others of the same step."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(update)

    def _flush(self) -> None:
        updates, self._unsent = self._unsent, []
        if updates:
            self.send(Updates(updates))

    def forget(self, stream: UpdateStream) -> None:
        """Forget a stream whose completions are finished."""
        self._streams.pop(stream.ids[0], None)

    def end_stream(self, stream: UpdateStream, reason: str, error: Exception | None) -> None:
        self._flush()  # the updates before the end
        if self._streams.pop(stream.ids[0], None) is not None:
            self.send(StreamEnded(stream.ids[0], reason, None if error is None else WireError.of(error)))

    def request_samples(self) -> asyncio.Future[None]:
        if self._samples_wanted is None:
            self._samples_wanted = asyncio.get_running_loop().create_future()
            self.send(SendSamples())
        return self._samples_wanted

    def ask_text(self, request_id: str, key: bytes | None) -> asyncio.Future[dict[str, str | bool] | None]:
        number = next(self._text_numbers)
        answer = self._text_calls[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._text_calls.pop(number, None))
        self.send(AskText(number, request_id, key))
        return answer

    async def release_all(self) -> None:
        """End all that a worker held that has exited."""
        for stream in list(self._streams.values()):
            self._hub.engine.cancel(stream)
        for number in [*self._reservations, *self._grants]:
            await self._release(number)
        if self._samples_wanted is not None:
            self._samples_wanted.cancel()
        for answer in list(self._text_calls.values()):
            if not answer.done():
                answer.set_result(None)

    async def serve(self) -> None:
        """Handle the worker's messages until it exits."""
        try:
            while True:
                message = await self._channel.receive()
                self.last_message = time.monotonic()
                await self._handle(message)
        except EOFError:
            return

    async def _handle(self, message: ToHub) -> None:
        match message:
            case SubmitAll(requests):
                self._submit(requests)
            case CancelStream(request_id):
                if (stream := self._streams.pop(request_id, None)) is not None:
                    self._hub.engine.cancel(stream)
            case Reserve() | BeginRequest() | ChargeTokens():
                await self._answer(message)
            case Scrape() | FindText():
                # These need further messages, also of this worker.
                task = asyncio.create_task(self._answer_later(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Release(call):
                await self._release(call)
            case EndRequest(call, unused):
                if (grant := self._grants.pop(call, None)) is not None:
                    self._hub.rate_limits.end(grant, unused)
            case Samples(samples):
                self.samples = samples
                if self._samples_wanted is not None and not self._samples_wanted.done():
                    self._samples_wanted.set_result(None)
                self._samples_wanted = None
            case RecordSteps(seconds):
                self._watching_until = time.monotonic() + seconds
                self._hub.update_watching()
                self._hub.engine.send(message)
            case SwitchPolicy():
                self._hub.engine.send(message)
            case TextFound(number, text):
                if (answer := self._text_calls.get(number)) is not None and not answer.done():
                    answer.set_result(text)
            case Listening():
                self.listening.set()

    def _submit(self, requests: list[Submit]) -> None:
        first = requests[0].request_id
        try:
            stream = self._hub.engine.submit(requests, _Forwarder(self), RelayStream)
        except Exception as error:
            self.send(StreamEnded(first, "refused", WireError.of(error)))
        else:
            self._streams[first] = stream

    async def _answer(self, message: Reserve | BeginRequest | ChargeTokens) -> None:
        try:
            match message:
                case Reserve(call, num_prompts, n, tenant):
                    on_displaced = partial(self._displace, call)
                    self._reservations[call] = self._hub.admission.take(num_prompts, n, tenant, on_displaced)
                    self.send(Reply(call))
                case BeginRequest(call, key):
                    grant = self._grants[call] = await self._hub.rate_limits.begin(key)
                    self.send(Reply(call, grant.headers))
                case ChargeTokens(call, begun, tokens):
                    grant = self._grants[begun]
                    await self._hub.rate_limits.charge(grant, tokens)
                    self.send(Reply(call, grant.headers))
        except Exception as error:
            self.send(Reply(message.call, error=WireError.of(error)))

    def _displace(self, call: int) -> None:
        del self._reservations[call]
        self.send(Displaced(call))

    async def _answer_later(self, message: Scrape | FindText) -> None:
        match message:
            case Scrape(call):
                await self._hub.collect_samples()
                self.send(Reply(call, self._hub.metrics.render()))
            case FindText(call, request_id, key):
                self.send(Reply(call, await self._hub.find_text(self, request_id, key)))

    async def _release(self, call: int) -> None:
        if (reservation := self._reservations.pop(call, None)) is not None:
            self._hub.admission.release(reservation)
        if (grant := self._grants.pop(call, None)) is not None:
            self._hub.rate_limits.end(grant, 0)


class _Forwarder:
    """The observer of a relayed stream."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link

    def on_update(self, update: Update) -> None:
        self.link.forward(update)

    def on_cut_short(self, reason: str, count: int) -> None:
        """The worker counts these when it receives the end."""


class RelayStream(UpdateStream):
    """Forwards updates to a worker instead of keeping them."""

    def push(self, update: Update) -> None:
        super().push(update)
        self._pending.clear()
        if not self._open:
            assert isinstance(self._observer, _Forwarder)
            self._observer.link.forget(self)

    def end(self, reason: str, error: Exception | None = None) -> list[str]:
        ended = super().end(reason, error)
        assert isinstance(self._observer, _Forwarder)
        self._observer.link.end_stream(self, reason, error)
        return ended
