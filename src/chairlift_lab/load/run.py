"""Send requests to a server in a closed or an open loop, and record what happened to each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from chairlift_lab.common.workload import BenchRequest


@dataclass(slots=True)
class LoadRecord:
    """The times and token counts of one request; times are seconds since the run began."""

    due: float  # the planned time
    sent: float
    times: list[float] = field(default_factory=list)  # arrival of each piece with tokens
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None  # the kind of failure
    retry_after: float | None = None  # seconds that the server asks to wait before the next attempt


@dataclass(slots=True)
class LoadRun:
    """One run of a workload."""

    seconds: float  # the time from the first request to the end of the last
    records: list[LoadRecord]
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # seconds by role of the process


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of requests in flight: the next is sent when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent at given times, independent of those before them."""

    times: Callable[[], Iterator[float]]  # seconds from the start, rising; one for each request, or endless


LoadLoop = ClosedLoop | OpenLoop
SendRequest = Callable[[BenchRequest, LoadRecord, Callable[[], float]], Awaitable[None]]
"""Sends a request and fills in its record; the last argument is the run's clock. Never raises."""
LoadProgress = Callable[[int, int, int], None]
"""Called with the numbers of finished requests, of open requests, and of pieces of answers received."""


class LoadGenerator:
    """Sends the requests of one run."""

    def __init__(self, send: SendRequest, *, duration: float | None = None) -> None:
        self.records: list[LoadRecord] = []
        self.num_open = 0
        self._send = send
        self._duration = float("inf") if duration is None else duration
        self._begun = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begun

    async def run(self, requests: Iterable[BenchRequest], loop: LoadLoop) -> LoadRun:
        """Send all requests, or those due within the duration, and wait for all of them."""
        cpu, self._begun = time.process_time(), time.perf_counter()
        if isinstance(loop, ClosedLoop):
            await self._run_closed(iter(requests), loop.concurrency)
        else:
            await self._run_open(iter(requests), loop.times())
        seconds = max((record.end for record in self.records), default=0.0)
        return LoadRun(seconds, self.records, {"client": time.process_time() - cpu})

    async def _run_closed(self, requests: Iterator[BenchRequest], concurrency: int) -> None:
        async def send_in_turn() -> None:
            while self.now() < self._duration:
                request = next(requests, None)
                if request is None:
                    return
                await self._send_one(request, due=self.now())

        async with asyncio.TaskGroup() as senders:
            for _ in range(concurrency):
                senders.create_task(send_in_turn())

    async def _run_open(self, requests: Iterator[BenchRequest], times: Iterator[float]) -> None:
        async with asyncio.TaskGroup() as in_flight:
            for due, request in zip(times, requests, strict=False):  # either may be endless
                if due >= self._duration:
                    return
                await asyncio.sleep(max(0.0, due - self.now()))
                in_flight.create_task(self._send_one(request, due))

    async def _send_one(self, request: BenchRequest, due: float) -> None:
        record = LoadRecord(due, self.now())
        self.records.append(record)
        self.num_open += 1
        try:
            await self._send(request, record, self.now)
        finally:
            self.num_open -= 1
