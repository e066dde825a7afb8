"""Mixed traffic on a server for a while: nothing may fail, change or grow."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.client.address import Address
from chairlift.client.http import HttpClient
from chairlift.errors import ChairliftError
from chairlift.lab.bench.soak.resources import (
    ProcessSample,
    growth_problems,
    memory_growth,
    process_sample,
    server_processes,
)
from chairlift.lab.bench.soak.traffic import QUESTIONS, SoakRequest, SoakTraffic, answer_text, expect_ok
from chairlift.lab.load.local_server import MODEL_NAME, LocalServer, local_server
from chairlift.lab.report.progress import Note

MAX_WAITING = 1000
SAMPLE_SECONDS = 1.0
REQUEST_SECONDS = 300.0  # a request that takes longer hangs
SETTLE_SECONDS = 30.0  # for the server to become idle after the traffic
MAX_PROBLEMS = 20
MAX_OPEN_FACTOR = 4  # times the concurrency: if the machine becomes slower, the traffic waits instead of piling up


@dataclass(frozen=True, slots=True)
class SoakPlan:
    seconds: float
    load: float  # share of the server's capacity
    calibration_seconds: float
    concurrency: int  # of the calibration
    memory_tolerance: int  # bytes that a process may grow by
    seed: int


@dataclass(slots=True)
class SoakFigures:
    rate: float = 0.0  # requests per second
    seconds: float = 0.0
    kinds: dict[str, list[float]] = field(default_factory=dict)  # seconds of each request
    statuses: Counter[int] = field(default_factory=Counter)
    resources: dict[str, list[ProcessSample]] = field(default_factory=dict)  # by role, over time
    idle_before: dict[str, ProcessSample] = field(default_factory=dict)
    idle_after: dict[str, ProcessSample] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class SoakFailed(ChairliftError):
    """The server did not hold."""


def soak(model: str, options: Mapping[str, Any], plan: SoakPlan, note: Note) -> SoakFigures:
    with local_server(model, options, max_waiting=MAX_WAITING) as server:
        return asyncio.run(_Soak(server, plan, note).run())


class _Soak:
    def __init__(self, server: LocalServer, plan: SoakPlan, note: Note) -> None:
        self._server = server
        self._plan = plan
        self._note = note
        self._http = HttpClient(Address.parse(server.url))
        self._pids = server_processes(server.process.pid)
        self._figures = SoakFigures()
        self._num_open = 0

    async def run(self) -> SoakFigures:
        plan, figures = self._plan, self._figures
        references = {question: await self._reference(question) for question in QUESTIONS}
        traffic = SoakTraffic(MODEL_NAME, plan.seed, references)
        self._note(f"measuring the capacity, {plan.calibration_seconds:g} s")
        capacity = await self._calibrate(traffic)
        figures.rate = plan.load * capacity
        await self._settle()
        figures.idle_before = self._sample()
        self._clear()
        begun = time.perf_counter()
        sampling = asyncio.create_task(self._watch())
        await self._send_at_rate(traffic, figures.rate, plan.seconds)
        figures.seconds = time.perf_counter() - begun
        sampling.cancel()
        await self._settle()
        figures.idle_after = self._sample()
        self._judge()
        return figures

    async def _reference(self, question: str) -> str:
        status, body = await self._post(SoakTraffic(MODEL_NAME, 0).reference_request(question))
        if problem := expect_ok(status, body):
            raise SoakFailed(f"the server does not answer as it should: {problem}")
        return answer_text(body)

    async def _calibrate(self, traffic: SoakTraffic) -> float:
        """Requests per second of a closed loop."""
        begun = time.perf_counter()
        count = 0

        async def send_in_turn() -> None:
            nonlocal count
            while time.perf_counter() - begun < self._plan.calibration_seconds:
                await self._send(traffic.request())
                count += 1

        async with asyncio.TaskGroup() as clients:
            for _ in range(self._plan.concurrency):
                clients.create_task(send_in_turn())
        return count / (time.perf_counter() - begun)

    async def _send_at_rate(self, traffic: SoakTraffic, rate: float, seconds: float) -> None:
        """Send requests at random times until `seconds` have passed, and wait for all of them."""
        rng, end = random.Random(self._plan.seed + 1), time.perf_counter() + seconds
        async with asyncio.TaskGroup() as in_flight:
            while time.perf_counter() < end:
                await asyncio.sleep(rng.expovariate(rate))
                while self._num_open >= MAX_OPEN_FACTOR * self._plan.concurrency:
                    await asyncio.sleep(0.05)
                in_flight.create_task(self._send(traffic.request()))

    async def _send(self, request: SoakRequest) -> None:
        begun = time.perf_counter()
        self._num_open += 1
        try:
            async with asyncio.timeout(request.hang_up_after or REQUEST_SECONDS):
                status, body = await self._post(request)
        except TimeoutError:  # the connection is closed
            if request.hang_up_after is None:
                self._report(request, f"no answer in {REQUEST_SECONDS:g} s")
        except Exception as error:
            self._report(request, f"{type(error).__name__}: {error}")
        else:
            self._figures.statuses[status] += 1
            if problem := request.check(status, body):
                self._report(request, problem)
        finally:
            self._num_open -= 1
            self._figures.kinds.setdefault(request.kind, []).append(time.perf_counter() - begun)

    async def _post(self, request: SoakRequest) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        response = await self._http.post(request.path, json.dumps(request.body).encode(), pieces.append)
        return response.status, b"".join(pieces)

    def _report(self, request: SoakRequest, problem: str) -> None:
        if len(self._figures.problems) < MAX_PROBLEMS:
            self._figures.problems.append(f"{request.kind}: {problem}")

    # ---- the server ----------------------------------------------------------------------------------------------

    def _sample(self) -> dict[str, ProcessSample]:
        return {role: process_sample(pid) for role, pid in self._pids.items()}

    async def _watch(self) -> None:
        begun = time.perf_counter()
        while True:
            for role, sample in self._sample().items():
                self._figures.resources.setdefault(role, []).append(sample)
            done = sum(map(len, self._figures.kinds.values()))
            self._note(f"{time.perf_counter() - begun:,.0f} s: {done:,} requests, {self._num_open} open")
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _settle(self) -> None:
        """Wait until the server holds nothing."""
        self._http.close()
        held, end = {"?": 1.0}, time.perf_counter() + SETTLE_SECONDS
        while any(held.values()):
            if time.perf_counter() > end:
                raise SoakFailed(f"the server still holds something without any requests: {held}")
            await asyncio.sleep(0.2)
            held = await asyncio.to_thread(self._held)

    def _held(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._server.url}/metrics") as response:
            text = response.read().decode()
        names = ("requests_open", "requests_running", "requests_waiting", "kv_blocks_used")
        return {
            name: float(found[1])
            for name in names
            if (found := re.search(rf"^chairlift_{name} (\S+)", text, re.MULTILINE))
        }

    def _clear(self) -> None:
        """Forget the figures of the calibration, but not its problems."""
        self._figures.kinds.clear()
        self._figures.statuses.clear()

    def _judge(self) -> None:
        """Add what is wrong with the server as a whole to the problems."""
        figures = self._figures
        failures = sum(count for status, count in figures.statuses.items() if status >= 500)
        if failures:
            figures.problems.append(f"{failures} answers have a 5xx status")
        if server_processes(self._server.process.pid) != self._pids:
            figures.problems.append("the engine was restarted")
        for role, samples in figures.resources.items():
            growth, before, after = memory_growth(samples), figures.idle_before[role], figures.idle_after[role]
            figures.problems += growth_problems(role, before, after, growth, self._plan.memory_tolerance)
