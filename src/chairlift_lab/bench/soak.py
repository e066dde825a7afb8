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
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from chairlift.byte_sizes import parse_bytes
from chairlift.client.http import Address, HttpClient
from chairlift.client.response import EventLineParser
from chairlift.cluster.options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.progress import Note
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Line, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engine_run import percentile
from chairlift_lab.common.timing import children
from chairlift_lab.load.local_server import MODEL_NAME, free_port, local_server

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
    found = {"front end": pid}
    for child in children(pid):
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            found["engine"] = child
    return found


def fleet_processes(ingress: int, replicas: Sequence[int]) -> dict[str, int]:
    """The ingress of a fleet and the front end and engine of each replica, by role; given the pids of their servers."""
    found = {"ingress": ingress}
    for number, replica in enumerate(sorted(replicas), start=1):
        found |= {f"{role} {number}": pid for role, pid in server_processes(replica).items()}
    return found


def memory_growth(samples: Sequence[ProcessSample]) -> int:
    """Bytes that the last fifth of the samples has more than the second one; the first is for warming up."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples[:1], samples[-fifth:]
    return round(mean(one.memory for one in late) - mean(one.memory for one in early))


def growth_problems(
    role: str, idle_before: ProcessSample, idle_after: ProcessSample, growth: int, tolerance: int
) -> list[str]:
    """What grew: memory during the traffic, file descriptors and threads from before to after it."""
    found = []
    if growth > tolerance:
        found.append(f"the {role}'s memory grew by {growth / 2**20:.1f} MiB")
    for what in ("files", "threads"):
        before, after = getattr(idle_before, what), getattr(idle_after, what)
        if after > before + FEW:
            found.append(f"the {role} had {before} {what} before and {after} after the traffic")
    return found


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
PATTERN = "[0-9]{2,4}-[a-f]{1,6}"
QUESTIONS = (
    "What is a chairlift?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write a short poem about snow.",
    "Count from one to ten.",
    "Tell me about the sea, the sea, the sea.",
)
WORDS = ("snow", "lift", "valley", "sun", "ski")
WARM_UP_WORDS = 200
# By kind, how often it is chosen.
KINDS = {
    "greedy": 30,
    "sampled": 20,
    "several": 6,
    "json": 8,
    "regex": 6,
    "tool": 8,
    "long prompt": 4,
    "cancelled": 8,
    "killed": 6,
    "tokenize": 6,
    "invalid": 4,
}

Check = Callable[[int, bytes], str | None]
"""Returns what is wrong with an answer, given its status and body."""


@dataclass(frozen=True, slots=True)
class SoakRequest:
    kind: str
    path: str
    body: dict[str, Any]
    check: Check
    hang_up_after: float | None = None  # seconds after which the client disconnects


class SoakTraffic:
    """Random requests; greedy ones must be answered as in `references`, by question."""

    def __init__(self, model: str, seed: int, references: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._rng = random.Random(seed)
        self._references = references or {}

    def request(self) -> SoakRequest:
        (kind,) = self._rng.choices(list(KINDS), list(KINDS.values()))
        return self._make(kind)

    def reference_request(self, question: str) -> SoakRequest:
        """The request whose answer is the reference of a question."""
        return SoakRequest("reference", "/v1/chat/completions", self._greedy(question), expect_ok)

    def warm_up_request(self) -> SoakRequest:
        """A long prompt that differs from all others, and one token."""
        body = {"model": self._model, "prompt": self._words(WARM_UP_WORDS), "max_tokens": 1}
        return SoakRequest("warm-up", "/v1/completions", body, expect_ok)

    def _make(self, kind: str) -> SoakRequest:
        rng, question = self._rng, self._rng.choice(QUESTIONS)
        chat, completion = "/v1/chat/completions", "/v1/completions"
        sampled = self._chat(question, temperature=1.0, max_tokens=rng.randint(1, 48), seed=rng.randrange(1000))
        match kind:
            case "greedy":
                body = self._greedy(question) | {"stream": rng.random() < 0.5}
                return SoakRequest(kind, chat, body, self._same_as_reference(question))
            case "sampled":
                return SoakRequest(kind, chat, sampled | {"stream": rng.random() < 0.7}, expect_ok)
            case "several":
                return SoakRequest(kind, chat, sampled | {"n": 3}, expect_ok)
            case "json":
                schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
                body = sampled | {"response_format": schema, "max_tokens": 96, "stream": rng.random() < 0.5}
                return SoakRequest(kind, chat, body, _expect_json)
            case "regex":
                return SoakRequest(kind, chat, sampled | {"guided_regex": PATTERN, "max_tokens": 32}, _expect_pattern)
            case "tool":
                body = sampled | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 96}
                return SoakRequest(kind, chat, body | {"stream": rng.random() < 0.5}, _expect_call)
            case "long prompt":
                body = {
                    "model": self._model,
                    "prompt": self._words(rng.randint(50, 150)),
                    "max_tokens": 4,
                    "temperature": 0,
                }
                return SoakRequest(kind, completion, body, expect_ok)
            case "cancelled" | "killed":
                body = sampled | {"max_tokens": 200, "ignore_eos": True, "stream": kind == "cancelled", "n": 2}
                return SoakRequest(kind, chat, body, expect_ok, hang_up_after=rng.uniform(0.0, 0.6))
            case "tokenize":
                text = question * rng.choice((1, 10, 2000))
                return SoakRequest(kind, "/tokenize", {"prompt": text}, expect_ok)
            case _:
                wrong = rng.choice(({"temperature": -1}, {"n": 0}, {"guided_regex": "("}, {"temprature": 1}))
                return SoakRequest(kind, chat, sampled | wrong, _expect_refusal)

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))

    def _chat(self, question: str, **options: Any) -> dict[str, Any]:
        return {"model": self._model, "messages": [{"role": "user", "content": question}]} | options

    def _greedy(self, question: str) -> dict[str, Any]:
        return self._chat(question, temperature=0, max_tokens=32, ignore_eos=True)

    def _same_as_reference(self, question: str) -> Check:
        def check(status: int, body: bytes) -> str | None:
            if problem := expect_ok(status, body):
                return problem
            expected, found = self._references.get(question), answer_text(body)
            return None if expected in (None, found) else f"{found!r} instead of {expected!r}"

        return check


def expect_ok(status: int, body: bytes) -> str | None:
    if status != 200:
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"
    if _is_stream(body) and not body.rstrip().endswith(b"[DONE]"):
        return "the stream is incomplete"
    return "an error in the stream" if b'data: {"error"' in body else None


def _expect_refusal(status: int, body: bytes) -> str | None:
    if status != 400 or "message" not in json.loads(body)["error"]:
        return f"HTTP {status} instead of 400"
    return None


def _expect_json(status: int, body: bytes) -> str | None:
    return expect_ok(status, body) or _json_problem(answer_text(body), is_complete=_finish_reason(body) == "stop")


def _expect_pattern(status: int, body: bytes) -> str | None:
    if problem := expect_ok(status, body):
        return problem
    text = answer_text(body)
    return None if re.fullmatch(PATTERN, text) else f"{text!r} does not match {PATTERN}"


def _expect_call(status: int, body: bytes) -> str | None:
    if problem := expect_ok(status, body):
        return problem
    arguments = {0: ""}  # There may be several calls.
    for choice in _choices(body):
        message = choice.get("message") or choice.get("delta") or {}
        for position, call in enumerate(message.get("tool_calls") or ()):
            number = call.get("index", position)  # only streamed calls have an index
            arguments[number] = arguments.get(number, "") + call["function"].get("arguments", "")
    is_complete = _finish_reason(body) != "length"
    problems = (_json_problem(text, is_complete=is_complete) for text in arguments.values())
    return next(filter(None, problems), None)


def _json_problem(text: str, *, is_complete: bool) -> str | None:
    """Check a text that must match SCHEMA, unless it was truncated."""
    if not is_complete:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return f"{text!r} is not JSON"
    return None if isinstance(found, dict) and found.keys() == {"city", "warm"} else f"{text!r} breaks the schema"


def _is_stream(body: bytes) -> bool:
    """Whether the body consists of events; a comment may come first while a request waits."""
    return body.startswith((b"data: ", b": "))


def _choices(body: bytes) -> list[dict[str, Any]]:
    """The choices of an answer, whole or streamed."""
    if not _is_stream(body):
        return list(json.loads(body)["choices"])
    events = [event for event in EventLineParser().feed(body) if event != b"[DONE]"]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def answer_text(body: bytes) -> str:
    """The text of the first choice."""
    parts = [choice.get("message") or choice.get("delta") or {} for choice in _choices(body) if choice["index"] == 0]
    return "".join(part.get("content") or "" for part in parts)


def _finish_reason(body: bytes) -> str | None:
    return next((choice["finish_reason"] for choice in reversed(_choices(body)) if choice["finish_reason"]), None)


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


@dataclass(frozen=True, slots=True)
class SoakPlan:
    seconds: float
    load: float  # share of the server's capacity
    calibration_seconds: float
    concurrency: int  # Requests in flight while the capacity is measured.
    memory_tolerance: int  # bytes that a process may grow by
    seed: int


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
        yield _Target(server.url, partial(server_processes, server.process.pid))


@contextmanager
def _fleet(model: str, options: Mapping[str, Any], replicas: int) -> Iterator[_Target]:
    """A fleet on a Ray cluster of its own on this machine; the traffic goes through its ingress."""
    from chairlift.cluster.ray_runtime import connect, disconnect
    from chairlift.cluster.serving.control import fleet_config, fleet_status, start_fleet, stop_fleet

    server = ServerOptions(port=free_port(), served_model_name=[MODEL_NAME], max_waiting=MAX_WAITING, drain_timeout=1.0)
    config = fleet_config(server, model, options, quiet=True)
    connect("local", log_to_driver=False)
    try:
        url = start_fleet(FLEET, config, ClusterOptions(replicas=replicas, replica_cpus=0))

        def processes() -> dict[str, int]:
            status = fleet_status(FLEET)
            return fleet_processes(status["pid"], [replica["pid"] for replica in status["replicas"]])

        yield _Target(url, processes)
        stop_fleet(FLEET)
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
        begun = time.perf_counter()
        sampling = asyncio.create_task(self._watch())
        await self._send_at_rate(traffic, sampling)
        figures.seconds = time.perf_counter() - begun
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
        begun, limit = time.perf_counter(), self._plan.calibration_seconds
        count = 0

        async def send_in_turn() -> None:
            nonlocal count
            while time.perf_counter() - begun < limit:
                await self._send(traffic.request())
                count += 1

        with suppress(TimeoutError):
            async with asyncio.timeout(2 * limit):
                await asyncio.gather(*(send_in_turn() for _ in range(self._plan.concurrency)))
        if not count:
            raise SoakFailed(f"no request ended in {2 * limit:g} s")
        return count / (time.perf_counter() - begun)

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
        found = {}
        for role, pid in self._pids.items():
            try:
                found[role] = process_sample(pid)
            except FileNotFoundError:
                raise SoakFailed(f"the process of the {role} ended") from None
        return found

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
            gauges = await asyncio.to_thread(self._gauges)
            held = {name: gauges[name] for name in HELD}

    def _gauges(self) -> dict[str, float]:
        """The metrics without labels, by name; those of a fleet are added up over its replicas."""
        try:
            with urllib.request.urlopen(f"{self._target.url}/metrics", timeout=METRICS_SECONDS) as response:
                text = response.read().decode()
        except OSError as error:
            raise SoakFailed(f"/metrics: {error}") from error
        found: dict[str, float] = defaultdict(float)
        for name, value in re.findall(r'^chairlift_(\w+)(?:\{replica="[^"]*"\})? (\S+)$', text, re.MULTILINE):
            found[name] += float(value)
        return found

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
            figures.problems += growth_problems(role, before, after, growth, self._plan.memory_tolerance)


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
    seconds: Annotated[float, typer.Option(help="Duration of the traffic.", min=1)] = 600.0,
    load: Annotated[float, typer.Option(help="Share of the server's capacity.", min=0.01, max=1)] = 0.7,
    calibration_seconds: Annotated[
        float, typer.Option(help="Duration of the measurement of the capacity.", min=1)
    ] = 30.0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight to measure the capacity.", min=1)] = 16,
    memory_tolerance: Annotated[str, typer.Option(help="How much the memory of a process may grow.")] = "32MiB",
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
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
    tolerance = parse_bytes("memory_tolerance", memory_tolerance)
    plan = SoakPlan(seconds, load, calibration_seconds, concurrency, tolerance, seed)
    found = soak(engine.model, options, plan, note, replicas=replicas)
    requests = [_request_row(kind, times) for kind, times in sorted(found.kinds.items())]
    processes = [_process_row(role, found) for role in found.resources]
    title = f"{engine.model}: {found.seconds:,.0f} s at {found.rate:.1f} requests/s ({load:.0%} of the capacity)"
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(found.statuses.items()))
    tables = [Table(title, REQUEST_COLUMNS, requests, statuses), Table("", PROCESS_COLUMNS, processes)]
    if found.problems:
        for table in tables:
            table.show()
        raise SoakFailed("; ".join(found.problems))
    settings = {"model": engine.model, "replicas": replicas, "rate": found.rate, "engine": options} | asdict(plan)
    return BenchResult(settings, [*requests, *processes], [*tables, Line("All checks passed.")])


def _request_row(kind: str, times: Sequence[float]) -> dict[str, Any]:
    figures = {f"seconds_p{share}": percentile(times, share) for share in (50, 95)}
    return {"name": kind, "requests": len(times)} | figures


def _process_row(role: str, found: SoakFigures) -> dict[str, Any]:
    samples, before, after = found.resources[role], found.idle_before[role], found.idle_after[role]
    return {
        "name": role,
        "memory": samples[-1].memory,
        "memory_growth": memory_growth(samples),
        "files_before": before.files,
        "files_after": after.files,
        "threads_before": before.threads,
        "threads_after": after.threads,
    }
