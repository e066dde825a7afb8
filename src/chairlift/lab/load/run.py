"""Sending requests to a server in a closed or an open loop, and writing down what happened to each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from chairlift.lab.common.workload import BenchRequest


@dataclass(slots=True)
class RequestRecord:
    """What one request met. Times are seconds since the run began."""

    due: float  # when it was to be sent
    sent: float
    times: list[float] = field(default_factory=list)  # when each piece with something new in it arrived
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None  # what kind of failure, in few words


@dataclass(slots=True)
class LoadRun:
    """One run of a workload."""

    seconds: float  # from the first request to the end of the last
    records: list[RequestRecord]
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of the processes that took part, by role


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many requests at a time: the next one is sent when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent when their time has come, whatever became of those before them."""

    times: Callable[[], Iterator[float]]  # seconds from the start, rising; one for each request, or endless


LoadLoop = ClosedLoop | OpenLoop
Send = Callable[[BenchRequest, RequestRecord, Callable[[], float]], Awaitable[None]]
"""Carries a request through and fills in its record; the last argument is the run's clock. Never raises."""
LoadProgress = Callable[[int, int, int], None]
"""Called with the numbers of requests that are done, that are open, and of pieces of answers that have arrived."""


class LoadGenerator:
    """A run under way."""

    def __init__(self, send: Send, *, duration: float | None = None) -> None:
        self.records: list[RequestRecord] = []
        self.num_open = 0
        self._send = send
        self._duration = float("inf") if duration is None else duration
        self._begun = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begun

    async def run(self, requests: Iterable[BenchRequest], loop: LoadLoop) -> LoadRun:
        """Send all requests, or those whose turn comes within the duration, and wait for every one of them."""
        cpu, self._begun = time.process_time(), time.perf_counter()
        if isinstance(loop, ClosedLoop):
            await self._run_closed(iter(requests), loop.concurrency)
        else:
            await self._run_open(iter(requests), loop.times())
        seconds = max((record.end for record in self.records), default=0.0)
        return LoadRun(seconds, self.records, {"client": time.process_time() - cpu})

    async def _run_closed(self, requests: Iterator[BenchRequest], concurrency: int) -> None:
        async def one_seat() -> None:
            while self.now() < self._duration:
                request = next(requests, None)
                if request is None:
                    return
                await self._carry(request, due=self.now())

        async with asyncio.TaskGroup() as seats:
            for _ in range(concurrency):
                seats.create_task(one_seat())

    async def _run_open(self, requests: Iterator[BenchRequest], times: Iterator[float]) -> None:
        async with asyncio.TaskGroup() as under_way:
            for due, request in zip(times, requests, strict=False):  # either may be endless
                if due >= self._duration:
                    return
                await asyncio.sleep(max(0.0, due - self.now()))
                under_way.create_task(self._carry(request, due))

    async def _carry(self, request: BenchRequest, due: float) -> None:
        record = RequestRecord(due, self.now())
        self.records.append(record)
        self.num_open += 1
        try:
            await self._send(request, record, self.now)
        finally:
            self.num_open -= 1
