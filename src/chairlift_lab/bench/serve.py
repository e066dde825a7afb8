"""A load on a server, and the same load on the engine alone for comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Annotated, Any

import typer

from chairlift.client.blocking import BlockingClient
from chairlift.client.http import Address, HttpClient
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions, given, refuse_engine_options, refuse_given
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import add_speedups
from chairlift_lab.common.workload import BenchRequest, LengthRange, Workload
from chairlift_lab.load.client import (
    WORDS,
    ClosedLoop,
    LoadClient,
    LoadGenerator,
    LoadLoop,
    LoadProgress,
    LoadRun,
    RequestFormat,
)
from chairlift_lab.load.figures import LatencyLimits, LoadTables, load_row, plot_load, watch_load
from chairlift_lab.load.local_server import MODEL_NAME, local_model_facts, local_server
from chairlift_lab.load.offline import run_offline
from chairlift_lab.load.options import LoadOptions, LoadTargetOptions, LoadWorkload
from chairlift_lab.load.traces import TraceEntry
from chairlift_lab.report.options import ReportOptions

SHOW_SECONDS = 0.25
MAX_WAITING = 100_000  # Overload shows as latency, not as refused requests.


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests and their loop; `requests` may be endless if there is a duration."""

    requests: Callable[[], Iterable[BenchRequest]]  # the same ones each time
    loop: LoadLoop
    duration: float | None = None
    warm_up: int = 4
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A running server."""

    address: Address
    request_format: RequestFormat
    api_key: str | None = None
    cpu_seconds: Callable[[], Mapping[str, float]] = field(default=dict)  # Those of its processes, if known.


def measure_server(target: ServerTarget, plan: LoadPlan, advance: LoadProgress) -> LoadRun:
    return asyncio.run(_measure(target, plan, advance))


async def _measure(target: ServerTarget, plan: LoadPlan, advance: LoadProgress) -> LoadRun:
    with closing(HttpClient(target.address, api_key=target.api_key)) as http:
        client = LoadClient(http, target.request_format, timeout=plan.timeout)
        await _warm_up(client, plan)
        client.num_pieces, before = 0, target.cpu_seconds()
        load = LoadGenerator(client.send, duration=plan.duration)
        shown = asyncio.create_task(_show(load, client, advance))
        run = await load.run(plan.requests(), plan.loop)
        shown.cancel()
        advance(len(run.records), 0, client.num_pieces)
        run.cpu_seconds |= {name: used - before.get(name, 0.0) for name, used in target.cpu_seconds().items()}
        return run


async def _warm_up(client: LoadClient, plan: LoadPlan) -> None:
    some = Workload(tuple(islice(plan.requests(), plan.warm_up))).warm_up(plan.warm_up)
    run = await LoadGenerator(client.send).run(some.requests, ClosedLoop(plan.warm_up))
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise ChairliftError(f"the server at {client.address} does not answer as it should: {failed[0]}")


async def _show(load: LoadGenerator, client: LoadClient, advance: LoadProgress) -> None:
    while True:
        advance(len(load.records) - load.num_open, load.num_open, client.num_pieces)
        await asyncio.sleep(SHOW_SECONDS)


def turns(repeat: int) -> Iterator[str]:
    """server offline, offline server, server offline, …: other load on the machine affects both."""
    pair = ["server", "offline"]
    for index in range(repeat):
        yield from pair[:: -1 if index % 2 else 1]


@bench(
    "serve",
    "chairlift bench serve",
    "chairlift bench serve --compare-offline --repeat 3 --json result.json --plot result.png",
    "chairlift bench serve --rate 2 --arrivals bursty --max-ttft-ms 2000 --max-tpot-ms 150",
    "chairlift bench serve --url http://localhost:8000 --concurrency 32 --prompt-len 256 --output-len 128",
    "chairlift bench serve --trace azure_2023_conversation.csv --trace-speed 0.2 --duration 120",
    report=ReportOptions,
)
def bench_serve(
    context: typer.Context,
    engine: EngineOptions,
    load: LoadOptions,
    work: LoadWorkload,
    server: LoadTargetOptions,
    limits: LatencyLimits,
    compare_offline: Annotated[
        bool,
        typer.Option("--compare-offline", help="Also run the same load on the engine without a server, in turns."),
    ] = False,
    repeat: Annotated[int, typer.Option(help="Repetitions, each with a new server.", min=1)] = 1,
) -> BenchResult:
    """Measure a server under load as its clients see it: throughput, latencies and goodput.

    Without --url, a server is started on a free port for the run. Requests are
    sent in a closed loop (--concurrency), in an open loop (--rate), or at the
    times of a recorded --trace.
    """
    _check_together(context, load, work, server, compare_offline)
    measurement = _Measurement(context, engine, load, work, server)
    runs = measurement.run(compare_offline, repeat)
    rows = [load_row(name, repeats, limits) for name, repeats in runs.items()]
    add_speedups(rows)
    return BenchResult(
        measurement.settings() | asdict(limits) | {"compare_offline": compare_offline, "repeat": repeat},
        rows,
        [LoadTables(rows, measurement.title, limits)],
        lambda path, footnote: plot_load(path, measurement.title, footnote, runs, limits),
    )


def _check_together(
    context: typer.Context, load: LoadOptions, work: LoadWorkload, server: LoadTargetOptions, compare_offline: bool
) -> None:
    """Refuse options that have no effect beside others."""
    server.request_format("")
    if server.url is None:
        refuse_given(context, ("token_ids", "api_key"), "only goes with --url")
    else:
        refuse_engine_options(context)
        refuse_given(context, ("repeat",), "starts a new server each time, so it does not go with --url")
    if work.workload is not None or work.trace is not None:
        names = ["prompt_len", "output_len", "shared_prefix", "prefix_groups"]
        refuse_given(context, names, "the requests come from a file; give only one of them")
    if work.workload is not None and server.api == "chat":
        raise InvalidParameter("workload", "has token ids, which a chat cannot send; use --api completions")
    if compare_offline:
        plain = server.api == "completions" and server.ignore_eos and not server.temperature
        if server.url is not None or load.duration is not None or not plain or server.extra_body != "{}":
            problem = "needs a server of ours, a number of requests, and requests as they are by default: completions"
            raise InvalidParameter("compare_offline", f"{problem} that ignore the end token, without extra parameters")


class _Measurement:
    """The load that the options describe, and the server it goes to."""

    def __init__(
        self,
        context: typer.Context,
        engine: EngineOptions,
        load: LoadOptions,
        work: LoadWorkload,
        server: LoadTargetOptions,
    ) -> None:
        self._engine, self._load, self._work, self._server = engine, load, work, server
        self._address = None if server.url is None else Address.parse(server.url)
        self._model, vocabulary, limit = self._facts(given(context, "model"))
        if limit is not None and work.longest() > limit:
            problem = f"requests may have {work.longest()} tokens, prompt and output, but the model takes {limit}"
            raise InvalidParameter("prompt_len" if work.workload is None else "workload", problem)
        recorded = _fitting(work.recorded(), limit)
        self._count = load.count(work.available(recorded))
        requests = work.requests(vocabulary, recorded, self._count)
        loop = load.loop(work.seed, recorded)
        self._plan = LoadPlan(requests, loop, load.duration, load.warmup, server.request_timeout)

    @property
    def title(self) -> str:
        return f"{self._model}: {self._load.describe(self._plan.loop)}"

    def run(self, compare_offline: bool, repeat: int) -> dict[str, list[LoadRun]]:
        """The runs by where the load went: to a server, and to the engine alone."""
        request_format = self._server.request_format(self._model)
        if self._address is not None:
            with self._watch("server") as advance:
                target = ServerTarget(self._address, request_format, self._server.api_key)
                return {"server": [measure_server(target, self._plan, advance)]}
        runs: dict[str, list[LoadRun]] = {"server": [], "offline": []} if compare_offline else {"server": []}
        for name in turns(repeat) if compare_offline else ["server"] * repeat:
            runs[name].append(self._run_server(request_format) if name == "server" else self._run_offline())
        return runs

    def _watch(self, name: str) -> AbstractContextManager[LoadProgress]:
        return watch_load(name, self._count, enabled=not self._engine.quiet)

    def _run_server(self, request_format: RequestFormat) -> LoadRun:
        """The load on a server of ours, started for it."""
        model, options = self._engine.model, self._engine.config()
        with self._watch("server") as advance, local_server(model, options, max_waiting=MAX_WAITING) as server:
            request_format = replace(request_format, model=MODEL_NAME)
            target = ServerTarget(Address.parse(server.url), request_format, cpu_seconds=server.cpu_seconds)
            return measure_server(target, self._plan, advance)

    def _run_offline(self) -> LoadRun:
        plan, workload = self._plan, Workload(tuple(self._plan.requests()))
        with self._watch("offline") as advance:
            return run_offline(self._engine.model, self._engine.config(), workload, plan.loop, plan.warm_up, advance)

    def settings(self) -> dict[str, Any]:
        """The settings of the report."""
        closed = isinstance(self._plan.loop, ClosedLoop)
        settings: dict[str, Any] = {"model": self._model, "loop": "closed" if closed else "open"}
        for options in (self._load, self._work, self._server):
            settings |= asdict(options)
        del settings["api_key"]
        for name in ("workload", "trace"):
            settings[name] = settings[name] and settings[name].name
        settings["concurrency"] = self._plan.loop.concurrency if isinstance(self._plan.loop, ClosedLoop) else None
        settings["num_requests"] = self._count
        settings["engine"] = self._engine.config() if self._address is None else None
        return settings

    def _facts(self, model_given: bool) -> tuple[str, Sequence[int], int | None]:
        """The model's name, the token ids of prompts, and the longest request if known."""
        words = range(len(WORDS)) if self._server.api == "chat" else None
        if self._address is None:
            options, progress = self._engine.config(), not self._engine.quiet
            vocabulary, limit = local_model_facts(self._engine.model, options, progress=progress)
            return self._engine.model, words or vocabulary, limit
        ids = LengthRange.parse("token_ids", self._server.token_ids)
        drawn_from = words or range(ids.low, ids.high + 1)
        if model_given:
            return self._engine.model, drawn_from, None
        served = BlockingClient(self._address, api_key=self._server.api_key).served_model()
        longest = served.get("max_model_len")
        return str(served["id"]), drawn_from, longest if isinstance(longest, int) else None


def _fitting(recorded: list[TraceEntry] | None, limit: int | None) -> list[TraceEntry] | None:
    """The entries that fit the model: traces of real services have longer contexts than most small models."""
    if recorded is None or limit is None:
        return recorded
    fitting = [entry for entry in recorded if entry.n_in + entry.n_out <= limit]
    if not fitting:
        raise InvalidParameter("trace_scale", f"no request of the trace fits into the model's {limit} tokens")
    if len(fitting) < len(recorded):
        missing = f"{len(recorded) - len(fitting):,} of {len(recorded):,} requests of the trace are left out"
        note(f"{missing}: they exceed the model's {limit:,} tokens (--trace-scale shortens them)")
    return fitting
