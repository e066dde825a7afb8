"""The cost of an open dashboard.

One load runs all the time while the page is open and closed in turns, so that other load on the machine affects both.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.client.http import Address, HttpClient
from chairlift.errors import ChairliftError
from chairlift.progress import Note
from chairlift_lab.common.cpu_time import children
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.client import LoadClient, RequestFormat
from chairlift_lab.load.local_server import MODEL_NAME, LocalServer, local_server
from chairlift_lab.load.run import ClosedLoop, LoadGenerator

SETTLE_SECONDS = 0.5  # after the page was opened or closed
STREAM = b"GET /dashboard/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True, slots=True)
class DashboardWindow:
    """A period in which the page was open or closed."""

    is_open: bool
    seconds: float
    tokens: int
    engine_cpu: float
    front_end_cpu: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class DashboardCost:
    windows: list[DashboardWindow] = field(default_factory=list)
    stream_bytes: int = 0
    front_end_memory: list[int] = field(default_factory=list)  # after each window
    engine_memory: list[int] = field(default_factory=list)  # grows until all of the KV cache has been written to

    def rate(self, *, is_open: bool) -> float:
        return statistics.fmean(window.tokens_per_s for window in self.windows if window.is_open is is_open)

    @property
    def ratio(self) -> float:
        """Throughput with the page open, as a share of that with it closed."""
        return statistics.fmean(self._pairs())

    @property
    def ratio_error(self) -> float | None:
        """One standard error of it; None if there is one pair only."""
        pairs = self._pairs()
        return statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else None

    def _pairs(self) -> list[float]:
        """Each open window against its closed neighbour."""
        found = []
        for one, other in zip(self.windows[::2], self.windows[1::2], strict=True):
            opened, closed = (one, other) if one.is_open else (other, one)
            found.append(opened.tokens_per_s / closed.tokens_per_s)
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "open" if is_open else "closed",
                "output_tokens_per_s": self.rate(is_open=is_open),
                "windows_tokens_per_s": [w.tokens_per_s for w in self.windows if w.is_open is is_open],
                "engine_cpu_share": self._share("engine_cpu", is_open),
                "front_end_cpu_share": self._share("front_end_cpu", is_open),
                "ratio": self.ratio if is_open else 1.0,
                "ratio_error": self.ratio_error if is_open else 0.0,
                "stream_bytes_per_s": self._stream_rate() if is_open else 0.0,
                "engine_cpu_ms_per_token": self._cpu_per_token(is_open),
                "front_end_memory_first_bytes": self.front_end_memory[0],
                "front_end_memory_last_bytes": self.front_end_memory[-1],
                "engine_memory_first_bytes": self.engine_memory[0],
                "engine_memory_last_bytes": self.engine_memory[-1],
            }
            for is_open in (False, True)
        ]

    def _share(self, name: str, is_open: bool) -> float:
        mine = [window for window in self.windows if window.is_open is is_open]
        seconds: float = sum(getattr(window, name) for window in mine)
        return seconds / sum(window.seconds for window in mine)

    def _cpu_per_token(self, is_open: bool) -> float:
        """CPU time per token, which other load on the machine hardly changes."""
        mine = [window for window in self.windows if window.is_open is is_open]
        return 1000 * sum(window.engine_cpu for window in mine) / max(1, sum(window.tokens for window in mine))

    def _stream_rate(self) -> float:
        return self.stream_bytes / sum(window.seconds for window in self.windows if window.is_open)


def measure_dashboard(
    model: str,
    options: Mapping[str, Any],
    requests: Iterable[BenchRequest],
    *,
    streams: int,
    pairs: int,
    seconds: float,
    note: Note,
) -> DashboardCost:
    """`requests` must not end before this does."""
    note("starting the server")
    with local_server(model, options, max_waiting=streams) as server:
        return asyncio.run(_measure(server, requests, streams, pairs, seconds, note))


async def _measure(
    server: LocalServer, requests: Iterable[BenchRequest], streams: int, pairs: int, seconds: float, note: Note
) -> DashboardCost:
    http = HttpClient(Address.parse(server.url))
    client = LoadClient(http, RequestFormat(MODEL_NAME), timeout=3600.0)
    load = LoadGenerator(client.send)
    running = asyncio.create_task(load.run(requests, ClosedLoop(streams)))
    cost = DashboardCost()
    try:
        note(f"{streams} streams begin")
        while client.num_pieces < 4 * streams and not running.done():  # all of them decode by then
            await asyncio.sleep(0.1)
        for number, is_open in enumerate(_turns(pairs), start=1):
            note(f"window {number} of {2 * pairs}: the page is {'open' if is_open else 'closed'}")
            async with _page(server.port, cost) if is_open else _closed_page():
                cost.windows.append(await _window(server, seconds, is_open=is_open))
            cost.front_end_memory.append(_memory([server.process.pid]))
            cost.engine_memory.append(_memory(children(server.process.pid)))
            failed = next((record.error for record in load.records if record.error is not None), None)
            if failed is not None or running.done():
                raise ChairliftError(f"the load did not last: {failed or 'there were too few requests'}")
        return cost
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        http.close()


def _turns(pairs: int) -> Iterator[bool]:
    """closed open, open closed, closed open, …"""
    for index in range(pairs):
        yield from (False, True)[:: -1 if index % 2 else 1]


async def _window(server: LocalServer, seconds: float, *, is_open: bool) -> DashboardWindow:
    await asyncio.sleep(SETTLE_SECONDS)
    begun, tokens, cpu = time.perf_counter(), await _tokens(server.port), server.cpu_seconds()
    await asyncio.sleep(seconds)
    lasted, made, used = time.perf_counter() - begun, await _tokens(server.port) - tokens, server.cpu_seconds()
    spent = {name: used[name] - cpu.get(name, 0.0) for name in used}
    return DashboardWindow(is_open, lasted, made, spent.get("engine", 0.0), spent.get("front_end", 0.0))


async def _tokens(port: int) -> int:
    """The output tokens that the server has counted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return round(sum(float(line.split()[1]) for line in lines if line.startswith("chairlift_output_tokens_total")))


@asynccontextmanager
async def _page(port: int, cost: DashboardCost) -> AsyncIterator[None]:
    """A client that reads the stream of the page."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(STREAM)

    async def look() -> None:
        while data := await reader.read(2**16):
            cost.stream_bytes += len(data)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        writer.close()


@asynccontextmanager
async def _closed_page() -> AsyncIterator[None]:
    yield


def _memory(pids: Iterable[int]) -> int:
    """Resident memory in bytes; 0 without /proc."""
    total = 0
    for one in pids:
        with suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return total
