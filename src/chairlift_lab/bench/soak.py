"""Mixed traffic on a server for a while: nothing may fail, change or grow.

    references    the greedy answers of an idle server
    warm-up       prompts until every KV block was written once: memory that is first used later looks like growth
    calibration   requests per second of a closed loop
    traffic       random arrivals at a share of that rate; then every open request has REQUEST_SECONDS to end
    verdict       the idle server after the traffic compared with the idle server before it

Every phase is bounded, so that the bench also ends on a slow or busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from chairlift.client.http import Address, HttpClient
from chairlift.cluster.options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.options import parse_bytes
from chairlift.progress import Note
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import percentile
from chairlift_lab.common.timing import children
from chairlift_lab.load.local_server import MODEL_NAME, free_port, local_fleet, local_server
from chairlift_lab.load.soak_traffic import QUESTIONS, SoakRequest, SoakTraffic, answer_text, expect_ok

FEW = 4  # file descriptors or threads that may be added: pools start threads lazily


@dataclass(frozen=True, slots=True)
class ProcessSample:
    memory: int  # resident bytes
    files: int
    threads: int


def process_sample(pid: int) -> ProcessSample:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(fields["VmRSS"].split()[0]) * 1024
    return ProcessSample(memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def server_processes(pid: int) -> dict[str, int]:
    """The front end and the engine of a server, by role."""
    pids = {"front end": pid}
    for child in children(pid):
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            pids["engine"] = child
    return pids


def fleet_processes(ingress: int, replicas: Sequence[int]) -> dict[str, int]:
    """The ingress of a fleet and the front end and engine of each replica, by role; given the pids of their servers."""
    pids = {"ingress": ingress}
    for number, replica in enumerate(sorted(replicas), start=1):
        pids |= {f"{role} {number}": pid for role, pid in server_processes(replica).items()}
    return pids


def memory_growth(samples: Sequence[ProcessSample]) -> int:
    """Bytes that the last fifth of the samples has more than the second one; the first is for warming up."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples[:1], samples[-fifth:]
    return round(mean(one.memory for one in late) - mean(one.memory for one in early))


def growth_problems(
    role: str, idle_before: ProcessSample, idle_after: ProcessSample, growth: int, tolerance: int
) -> list[str]:
    """What grew: memory during the traffic, file descriptors and threads from before to after it."""
    problems = []
    if growth > tolerance:
        problems.append(f"the {role}'s memory grew by {growth / 2**20:.1f} MiB")
    for what in ("files", "threads"):
        before, after = getattr(idle_before, what), getattr(idle_after, what)
        if after > before + FEW:
            problems.append(f"the {role} had {before} {what} before and {after} after the traffic")
    return problems


FLEET = "bench-soak"
MAX_WAITING = 1000
SAMPLE_SECONDS = 1.0
REQUEST_SECONDS = 120.0  # a request that takes longer hangs
WARM_UP_SECONDS = 180.0
WARM_UP_CONCURRENCY = 4
METRICS_SECONDS = 10.0  # The limit for an answer of /metrics.
SETTLE_SECONDS = 30.0  # The server must be idle so long after the traffic.
MAX_PROBLEMS = 20
HELD = ("requests_open", "requests_running", "requests_waiting", "kv_blocks_used")  # gauges that are 0 when idle
MAX_OPEN_FACTOR = 2  # times the concurrency: if the machine becomes slower, the traffic waits instead of piling up


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    seconds: Annotated[float, typer.Option(help="Duration of the traffic.", min=1)] = 600.0
    load: Annotated[float, typer.Option(help="Share of the server's capacity.", min=0.01, max=1)] = 0.7
    calibration_seconds: Annotated[float, typer.Option(help="Duration of the measurement of the capacity.", min=1)] = (
        30.0
    )
    concurrency: Annotated[int, typer.Option(help="Requests in flight to measure the capacity.", min=1)] = 16
    memory_tolerance: Annotated[str, typer.Option(help="How much the memory of a process may grow.")] = "32MiB"
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0

    @property
    def tolerance(self) -> int:
        """Bytes that a process may grow by."""
        return parse_bytes("memory_tolerance", self.memory_tolerance)


@dataclass(slots=True)
class SoakFigures:
    rate: float = 0.0  # requests per second
    seconds: float = 0.0
    kinds: dict[str, list[float]] = field(default_factory=dict)  # seconds of each request
    statuses: Counter[int] = field(default_factory=Counter)
    resources: dict[str, list[ProcessSample]] = field(default_factory=dict)  # The samples of each role, over time.
    idle_before: dict[str, ProcessSample] = field(default_factory=dict)
    idle_after: dict[str, ProcessSample] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class SoakFailed(ChairliftError):
    """The server did not hold."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What the traffic is sent to."""

    url: str
    processes: Callable[[], dict[str, int]]  # pids by role; others after a restart


def soak(model: str, options: Mapping[str, Any], plan: SoakPlan, note: Note, *, replicas: int = 0) -> SoakFigures:
    """`replicas` is the number of those of a fleet; 0 for a single server."""
    block_size = EngineConfig(**options).block_size
    with _fleet(model, options, replicas) if replicas else _single_server(model, options) as target:
        return asyncio.run(_Soak(target, block_size, plan, note).run())


@contextmanager
def _single_server(model: str, options: Mapping[str, Any]) -> Iterator[_Target]:
    with local_server(model, options, max_waiting=MAX_WAITING) as server:
        yield _Target(server.url, lambda: server_processes(server.process.pid))


@contextmanager
def _fleet(model: str, options: Mapping[str, Any], replicas: int) -> Iterator[_Target]:
    """A fleet on a Ray cluster of its own on this machine; the traffic goes through its ingress."""
    from chairlift.cluster.ray_runtime import connect, disconnect
    from chairlift.cluster.serving.fleet import fleet_config

    server = ServerOptions(port=free_port(), served_model_name=[MODEL_NAME], max_waiting=MAX_WAITING, drain_timeout=1.0)
    config = fleet_config(server, model, options, quiet=True)
    connect("local", log_to_driver=False)
    try:
        with local_fleet(FLEET, config, ClusterOptions(replicas=replicas, replica_cpus=0)) as (url, status):

            def processes() -> dict[str, int]:
                fleet = status()
                return fleet_processes(fleet["pid"], [replica["pid"] for replica in fleet["replicas"]])

            yield _Target(url, processes)
    finally:
        disconnect()


class _Soak:
    def __init__(self, target: _Target, block_size: int, plan: SoakPlan, note: Note) -> None:
        self._target = target
        self._block_size = block_size
        self._plan = plan
        self._note = note
        self._http = HttpClient(Address.parse(target.url))
        self._pids = target.processes()
        self._figures = SoakFigures()
        self._num_open = 0

    async def run(self) -> SoakFigures:
        try:
            await self._run_phases()
        except SoakFailed as error:  # Problems that were found before are reported, too.
            raise SoakFailed("; ".join([*self._figures.problems, str(error)])) from error
        return self._figures

    async def _run_phases(self) -> None:
        plan, figures = self._plan, self._figures
        self._note("greedy answers")
        references = {question: await self._reference(question) for question in QUESTIONS}
        traffic = SoakTraffic(MODEL_NAME, plan.seed, references)
        self._note("warming up: writing every KV block")
        await self._warm_up(traffic)
        self._note(f"measuring the capacity, {plan.calibration_seconds:g} s")
        figures.rate = plan.load * await self._calibrate(traffic)
        await self._settle()
        figures.idle_before = self._sample()
        self._clear()
        start_time = time.perf_counter()
        sampling = asyncio.create_task(self._watch())
        await self._send_at_rate(traffic, sampling)
        figures.seconds = time.perf_counter() - start_time
        if sampling.done():
            sampling.result()  # raises what ended it
        sampling.cancel()
        await self._settle()
        figures.idle_after = self._sample()
        self._judge(await asyncio.to_thread(self._target.processes))

    async def _reference(self, question: str) -> str:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                status, body = await self._post(SoakTraffic(MODEL_NAME, 0).reference_request(question))
        except TimeoutError:
            raise SoakFailed(f"an idle server did not answer in {REQUEST_SECONDS:g} s") from None
        if problem := expect_ok(status, body):
            raise SoakFailed(f"the server does not answer as it should: {problem}")
        return answer_text(body)

    async def _warm_up(self, traffic: SoakTraffic) -> None:
        """Send different prompts until their blocks, which the prefix cache keeps, are all of the pool."""
        missing = self._gauges()["kv_blocks_total"]

        async def send_in_turn() -> None:
            nonlocal missing
            while missing > 0:
                status, body = await self._post(traffic.warm_up_request())
                if problem := expect_ok(status, body):
                    raise SoakFailed(f"the warm-up failed: {problem}")
                missing -= json.loads(body)["usage"]["prompt_tokens"] // self._block_size

        try:
            async with asyncio.timeout(WARM_UP_SECONDS):
                await asyncio.gather(*(send_in_turn() for _ in range(WARM_UP_CONCURRENCY)))
        except TimeoutError:
            problem = f"{missing:,.0f} KV blocks were not written after {WARM_UP_SECONDS:g} s"
            raise SoakFailed(f"{problem}; choose a smaller --kv-memory") from None

    async def _calibrate(self, traffic: SoakTraffic) -> float:
        """Requests per second of a closed loop; those that are open for as long again are cut off."""
        start_time, limit = time.perf_counter(), self._plan.calibration_seconds
        count = 0

        async def send_in_turn() -> None:
            nonlocal count
            while time.perf_counter() - start_time < limit:
                await self._send(traffic.request())
                count += 1

        with suppress(TimeoutError):
            async with asyncio.timeout(2 * limit):
                await asyncio.gather(*(send_in_turn() for _ in range(self._plan.concurrency)))
        if not count:
            raise SoakFailed(f"no request ended in {2 * limit:g} s")
        return count / (time.perf_counter() - start_time)

    async def _send_at_rate(self, traffic: SoakTraffic, sampling: asyncio.Task[None]) -> None:
        """Send requests at random times until the end of the plan or of `sampling`, and wait for all of them."""
        plan, rate = self._plan, self._figures.rate
        rng, end = random.Random(plan.seed + 1), time.perf_counter() + plan.seconds
        async with asyncio.TaskGroup() as in_flight:
            while not sampling.done():
                await asyncio.sleep(min(rng.expovariate(rate), max(0.0, end - time.perf_counter())))
                while self._num_open >= MAX_OPEN_FACTOR * plan.concurrency and time.perf_counter() < end:
                    await asyncio.sleep(0.05)
                if time.perf_counter() >= end:
                    break
                in_flight.create_task(self._send(traffic.request()))

    async def _send(self, request: SoakRequest) -> None:
        start_time = time.perf_counter()
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
            self._figures.kinds.setdefault(request.kind, []).append(time.perf_counter() - start_time)

    async def _post(self, request: SoakRequest) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        response = await self._http.post(request.path, json.dumps(request.body).encode(), pieces.append)
        return response.status, b"".join(pieces)

    def _report(self, request: SoakRequest, problem: str) -> None:
        if len(self._figures.problems) < MAX_PROBLEMS:
            self._figures.problems.append(f"{request.kind}: {problem}")

    # ---- the server ----------------------------------------------------------------------------------------------

    def _sample(self) -> dict[str, ProcessSample]:
        samples = {}
        for role, pid in self._pids.items():
            try:
                samples[role] = process_sample(pid)
            except FileNotFoundError:
                raise SoakFailed(f"the process of the {role} ended") from None
        return samples

    async def _watch(self) -> None:
        start_time = time.perf_counter()
        while True:
            for role, sample in self._sample().items():
                self._figures.resources.setdefault(role, []).append(sample)
            done = sum(map(len, self._figures.kinds.values()))
            self._note(f"{time.perf_counter() - start_time:,.0f} s: {done:,} requests, {self._num_open} open")
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _settle(self) -> None:
        """Wait until the server holds nothing."""
        self._http.close()
        held, end = {"?": 1.0}, time.perf_counter() + SETTLE_SECONDS
        while any(held.values()):
            if time.perf_counter() > end:
                raise SoakFailed(f"the server still holds something without any requests: {held}")
            await asyncio.sleep(0.2)
            gauges = await asyncio.to_thread(self._gauges)
            held = {name: gauges[name] for name in HELD}

    def _gauges(self) -> dict[str, float]:
        """The metrics without labels, by name; those of a fleet are added up over its replicas."""
        try:
            with urllib.request.urlopen(f"{self._target.url}/metrics", timeout=METRICS_SECONDS) as response:
                text = response.read().decode()
        except OSError as error:
            raise SoakFailed(f"/metrics: {error}") from error
        gauges: dict[str, float] = defaultdict(float)
        for name, value in re.findall(r'^chairlift_(\w+)(?:\{replica="[^"]*"\})? (\S+)$', text, re.MULTILINE):
            gauges[name] += float(value)
        return gauges

    def _clear(self) -> None:
        """Forget the figures of the calibration, but not its problems."""
        self._figures.kinds.clear()
        self._figures.statuses.clear()

    def _judge(self, pids: Mapping[str, int]) -> None:
        """Add what is wrong with the server as a whole to the problems."""
        figures = self._figures
        failures = sum(count for status, count in figures.statuses.items() if status >= 500)
        if failures:
            figures.problems.append(f"{failures} answers have a 5xx status")
        if pids != self._pids:
            figures.problems.append("a process was restarted")
        for role, samples in figures.resources.items():
            growth, before, after = memory_growth(samples), figures.idle_before[role], figures.idle_after[role]
            figures.problems += growth_problems(role, before, after, growth, self._plan.tolerance)


DEFAULTS = {
    "speculate": "ngram",
    "batch_invariant": True,  # otherwise rounding depends on the batch, and close decisions of greedy answers with it
    "kv_memory": "128MiB",  # the warm-up writes all of it
}
REQUEST_COLUMNS = (
    Column("Requests", "name"),
    Column("Count", "requests", ",d"),
    Column("p50", "seconds_p50", ",.0f", 1000, " ms"),
    Column("p95", "seconds_p95", ",.0f", 1000, " ms"),
)
PROCESS_COLUMNS = (
    Column("Process", "name"),
    Column("Memory", "memory", ",.0f", 2**-20, " MiB"),
    Column("Growth", "memory_growth", "+,.1f", 2**-20, " MiB"),
    Column("Files before", "files_before", "d"),
    Column("after", "files_after", "d"),
    Column("Threads before", "threads_before", "d"),
    Column("after", "threads_after", "d"),
)


@bench(
    "soak",
    "chairlift bench soak",
    "chairlift bench soak --seconds 60 --json result.json",
    "chairlift bench soak --model Qwen/Qwen3-0.6B --load 0.9",
    "chairlift bench soak --replicas 2",
)
def bench_soak(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    plan: SoakPlan,
    replicas: Annotated[
        int, typer.Option(help="Replicas of a fleet on Ray, behind its ingress; 0 for a single server.", min=0)
    ] = 0,
) -> BenchResult:
    """Mixed traffic on a server or a fleet for a long time; fails if anything fails, changes or grows.

    Requests of many kinds (greedy, sampled, structured, tools, cancelled,
    killed connections, invalid, …) arrive at random times. There must be no
    5xx, greedy answers must stay the same, structured ones must match their
    schema, and the memory, file descriptors and threads of all processes must
    not grow. Unless given, the options are --speculate ngram,
    --batch-invariant and --kv-memory 128MiB.
    """
    options = engine.config() | {name: value for name, value in DEFAULTS.items() if not given(context, name)}
    tolerance = plan.tolerance  # raises if it is no size
    figures = soak(engine.model, options, plan, note, replicas=replicas)
    requests = [
        {"name": kind, "requests": len(times)} | {f"seconds_p{share}": percentile(times, share) for share in (50, 95)}
        for kind, times in sorted(figures.kinds.items())
    ]
    processes = [_process_row(role, figures) for role in figures.resources]
    title = (
        f"{engine.model}: {figures.seconds:,.0f} s at {figures.rate:.1f} requests/s ({plan.load:.0%} of the capacity)"
    )
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(figures.statuses.items()))
    tables = [Table(title, REQUEST_COLUMNS, requests, statuses), Table("", PROCESS_COLUMNS, processes)]
    if figures.problems:
        for table in tables:
            table.show()
        raise SoakFailed("; ".join(figures.problems))
    settings = {"model": engine.model, "replicas": replicas, "rate": figures.rate, "engine": options} | asdict(plan)
    settings["memory_tolerance"] = tolerance
    return BenchResult(settings, [*requests, *processes], [*tables, Line("All checks passed.")])


def _process_row(role: str, figures: SoakFigures) -> dict[str, Any]:
    samples, before, after = figures.resources[role], figures.idle_before[role], figures.idle_after[role]
    return {
        "name": role,
        "memory": samples[-1].memory,
        "memory_growth": memory_growth(samples),
        "files_before": before.files,
        "files_after": after.files,
        "threads_before": before.threads,
        "threads_after": after.threads,
    }
