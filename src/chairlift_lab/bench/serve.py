"""A load on a server, and the same load on the engine alone for comparison."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.client.blocking import BlockingClient
from chairlift.client.http import Address, HttpClient
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options import above, at_least
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions, given, refuse_engine_options, refuse_given
from chairlift_lab.bench.base import BenchResult, WorkloadOptions, bench, progress_bar
from chairlift_lab.common.engines import add_speedups
from chairlift_lab.common.workload import (
    BenchRequest,
    LengthRange,
    SharedPrefixes,
    Workload,
    draw_requests,
    load_workload,
)
from chairlift_lab.load.client import (
    APIS,
    WORDS,
    ClosedLoop,
    LoadClient,
    LoadGenerator,
    LoadLoop,
    LoadProgress,
    LoadRun,
    OpenLoop,
    RequestFormat,
)
from chairlift_lab.load.figures import LatencyLimits, LoadTables, load_row, plot_load
from chairlift_lab.load.local_server import MODEL_NAME, local_model_facts, local_server, run_offline
from chairlift_lab.load.trace_files import TraceEntry, load_trace
from chairlift_lab.load.traces import ARRIVALS, Arrivals, trace_requests
from chairlift_lab.report.options import Positive, ReportOptions, Settings

SHOW_SECONDS = 0.25
MAX_WAITING = 100_000  # Overload shows as latency, not as refused requests.
_load, _workload, _server = (partial(typer.Option, rich_help_panel=panel) for panel in ("Load", "Workload", "Server"))
CONCURRENCY = 16
PER_SLOT = 5  # requests per unit of concurrency, so that most of them meet a busy server
OPEN_SECONDS = 60

Requests = Callable[[], Iterator[BenchRequest]]
"""The requests of a workload, the same ones at every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(Settings):
    """The rate and number of requests."""

    concurrency: Annotated[
        int | None,
        at_least(1),
        _load(
            help="Closed loop: requests in flight; the next is sent when one ends.",
            show_default=f"{CONCURRENCY}, unless there is a rate or a trace",
        ),
    ] = None
    rate: Annotated[float | None, _load(help="Open loop: requests per second, independent of the server.")] = None
    arrivals: Annotated[str, _load(help=f"Open loop: {', '.join(ARRIVALS)}.")] = "poisson"
    burstiness: Annotated[
        float | None,
        _load(
            help="Shape of the gamma distribution of bursty gaps; 1 is Poisson, less is burstier.", show_default="0.25"
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        at_least(1),
        _load(
            "--num-requests",
            "-n",
            help="Number of requests.",
            show_default=f"{PER_SLOT} for each of --concurrency, {OPEN_SECONDS} s of --rate, or all of a file",
        ),
    ] = None
    duration: Annotated[
        float | None, above(0), _load(help="Send for this many seconds, then wait for open requests.")
    ] = None
    warmup: Annotated[int, at_least(0), _load(help="Short requests before the run, not counted.")] = 4

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.concurrency is not None and self.rate is not None:
            raise InvalidParameter("rate", "makes an open loop and --concurrency a closed one; give only one of them")
        if self.rate is None and (self.burstiness is not None or self.arrivals != "poisson"):
            raise InvalidParameter("arrivals", "needs a --rate")
        if self.rate is not None:
            Arrivals.parse(self.rate, self.arrivals, self.burstiness)

    def loop(self, seed: int, recorded: Sequence[TraceEntry] | None) -> LoadLoop:
        """The loop that the options describe; a trace keeps its own times unless they say otherwise."""
        if self.rate is not None:
            arrivals = Arrivals.parse(self.rate, self.arrivals, self.burstiness)
            return OpenLoop(lambda: arrivals.times(seed))
        if recorded is not None and self.concurrency is None:
            return OpenLoop(lambda: iter([entry.at for entry in recorded]))
        return ClosedLoop(self.concurrency or CONCURRENCY)

    def describe(self, loop: LoadLoop) -> str:
        if isinstance(loop, ClosedLoop):
            return f"closed loop, {loop.concurrency} at a time"
        if self.rate is None:
            return "open loop, as recorded"
        return f"open loop, {self.rate:g} requests/s, {self.arrivals}"

    def count(self, available: int | None) -> int | None:
        """The number of requests out of `available` (None: endless); None if only the duration ends the run."""
        if self.num_requests is not None or available is not None:
            return min(count for count in (self.num_requests, available) if count is not None)
        if self.duration is not None:
            return None
        if self.rate is not None:
            return max(1, round(self.rate * OPEN_SECONDS))
        return PER_SLOT * (self.concurrency or CONCURRENCY)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWorkload(WorkloadOptions):
    """The requests: random, from a file, or like a trace."""

    shared_prefix: Annotated[float, _workload(help="Share of every prompt that is a common prefix.")] = 0.0
    prefix_groups: Annotated[int, _workload(help="Number of different common prefixes.")] = 1
    trace: Annotated[
        Path | None, _workload(help="Read times and lengths from a trace: an Azure CSV or a Mooncake JSONL file.")
    ] = None
    trace_speed: Annotated[Positive, _workload(help="Replay the trace this many times as fast.")] = 1.0
    trace_scale: Annotated[Positive, _workload(help="Multiply the lengths of the trace by this.")] = 1.0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.workload is not None and self.trace is not None:
            raise InvalidParameter("trace", "requests come from a workload file or from a trace; give only one of them")
        for name in ("trace_speed", "trace_scale"):
            if getattr(self, name) != 1 and self.trace is None:
                raise InvalidParameter(name, "only goes with a --trace")
        self._drawn([1])

    def requests(
        self, vocabulary: Sequence[int], limit: int | None
    ) -> tuple[Requests, int | None, list[TraceEntry] | None]:
        """The requests, how many there are (None: endless), and the entries of a trace; `limit` is the model's."""
        if self.trace is not None:
            recorded = [entry.scaled(self.trace_scale, self.trace_speed) for entry in load_trace(self.trace)]
            entries = recorded if limit is None else _fitting(recorded, limit)
            make = partial(trace_requests, vocabulary, entries, seed=self.seed, lengths=self.trace_scale)
            return make, len(entries), entries
        work = None if self.workload is None else load_workload(self.workload)
        longest = sum(length.high for length in self.lengths().values()) if work is None else work.longest
        if limit is not None and longest > limit:
            problem = f"requests may have {longest} tokens, prompt and output, but the model takes {limit}"
            raise InvalidParameter("prompt_len" if work is None else "workload", problem)
        if work is not None:
            return lambda: iter(work.requests), len(work.requests), None
        return self._drawn(vocabulary), None, None

    def _drawn(self, vocabulary: Sequence[int]) -> Requests:
        shared = SharedPrefixes(self.shared_prefix, self.prefix_groups)
        return partial(draw_requests, vocabulary, seed=self.seed, shared=shared, **self.lengths())


def _fitting(recorded: list[TraceEntry], limit: int) -> list[TraceEntry]:
    """The entries that fit the model: traces of real services have longer contexts than most small models."""
    fitting = [entry for entry in recorded if entry.n_in + entry.n_out <= limit]
    if not fitting:
        raise InvalidParameter("trace_scale", f"no request of the trace fits into the model's {limit} tokens")
    if len(fitting) < len(recorded):
        missing = f"{len(recorded) - len(fitting):,} of {len(recorded):,} requests of the trace are left out"
        note(f"{missing}: they exceed the model's {limit:,} tokens (--trace-scale shortens them)")
    return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTargetOptions:
    """The server, and the parameters of all requests."""

    url: Annotated[
        str | None, _server(help="An OpenAI-compatible server.", show_default="one of ours, started for the run")
    ] = None
    api_key: Annotated[str | None, _server(help="API key for --url.", envvar="CHAIRLIFT_API_KEY")] = None
    api: Annotated[
        str, _server(help=f"{' or '.join(APIS)}: prompts of token ids with exact lengths, or messages of common words.")
    ] = "completions"
    token_ids: Annotated[str, _server(metavar="LOW:HIGH", help="With --url: token ids of the prompts.")] = "1000:10000"
    ignore_eos: Annotated[
        bool, _server("--ignore-eos/--no-ignore-eos", help="Generate exactly the given length. Not every server can.")
    ] = True
    temperature: Annotated[float, _server(help="Sampling temperature.")] = 0.0
    extra_body: Annotated[str, _server(metavar="JSON", help="More parameters for every request.")] = "{}"
    request_timeout: Annotated[float, _server(help="Seconds after which a request fails.", min=0.001)] = 600.0

    def request_format(self, model: str) -> RequestFormat:
        try:
            extra = json.loads(self.extra_body)
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise InvalidParameter(
                "extra_body", f'must be a JSON object such as {{"top_k": 5}}, got {self.extra_body!r}'
            )
        return RequestFormat(model, self.api, self.temperature, self.ignore_eos, extra)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests and their loop; `requests` may be endless if there is a duration."""

    requests: Requests
    loop: LoadLoop
    duration: float | None
    warm_up: int
    timeout: float


async def measure_server(
    http: HttpClient,
    request_format: RequestFormat,
    plan: LoadPlan,
    advance: LoadProgress,
    cpu_seconds: Callable[[], Mapping[str, float]] = dict,
) -> LoadRun:
    """Send the load to a running server; `cpu_seconds` are those of its processes so far, if known."""
    with closing(http):
        client = LoadClient(http, request_format, timeout=plan.timeout)
        some = Workload(tuple(islice(plan.requests(), plan.warm_up))).warm_up(plan.warm_up)
        warm_up = await LoadGenerator(client.send).run(some.requests, ClosedLoop(plan.warm_up))
        if failed := [record.error for record in warm_up.records if record.error is not None]:
            raise ChairliftError(f"the server at {client.address} does not answer as it should: {failed[0]}")
        client.num_pieces, before = 0, cpu_seconds()
        load = LoadGenerator(client.send, duration=plan.duration)

        async def show() -> None:
            while True:
                advance(len(load.records) - load.num_open, load.num_open, client.num_pieces)
                await asyncio.sleep(SHOW_SECONDS)

        shown = asyncio.create_task(show())
        run = await load.run(plan.requests(), plan.loop)
        shown.cancel()
        advance(len(run.records), 0, client.num_pieces)
        run.cpu_seconds |= {name: used - before.get(name, 0.0) for name, used in cpu_seconds().items()}
        return run


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
    address = None if server.url is None else Address.parse(server.url)
    model, vocabulary, limit = _facts(engine, server, address, given(context, "model"))
    requests, available, recorded = work.requests(vocabulary, limit)
    count, loop = load.count(available), load.loop(work.seed, recorded)
    plan = LoadPlan(lambda: islice(requests(), count), loop, load.duration, load.warmup, server.request_timeout)
    request_format = server.request_format(model)

    def measure(name: str) -> LoadRun:
        with _watch(name, count, enabled=not engine.quiet) as advance:
            if name == "offline":
                workload = Workload(tuple(plan.requests()))
                return run_offline(engine.model, engine.config(), workload, loop, plan.warm_up, advance)
            if address is not None:
                http = HttpClient(address, api_key=server.api_key)
                return asyncio.run(measure_server(http, request_format, plan, advance))
            with local_server(engine.model, engine.config(), max_waiting=MAX_WAITING) as ours:
                http, format = HttpClient(Address.parse(ours.url)), replace(request_format, model=MODEL_NAME)
                return asyncio.run(measure_server(http, format, plan, advance, ours.cpu_seconds))

    runs: dict[str, list[LoadRun]] = {}
    for name in turns(repeat) if compare_offline else ["server"] * repeat:
        runs.setdefault(name, []).append(measure(name))
    rows = [load_row(name, repeats, limits) for name, repeats in runs.items()]
    add_speedups(rows)
    closed = isinstance(loop, ClosedLoop)
    settings: dict[str, Any] = {"model": model, "loop": "closed" if closed else "open"}
    settings |= asdict(load) | asdict(work) | asdict(server) | asdict(limits)
    del settings["api_key"]
    files = {"workload": work.workload, "trace": work.trace}
    settings |= {name: None if path is None else path.name for name, path in files.items()}
    settings |= {"concurrency": loop.concurrency if isinstance(loop, ClosedLoop) else None, "num_requests": count}
    settings |= {"engine": engine.config() if address is None else None}
    title = f"{model}: {load.describe(loop)}"
    return BenchResult(
        settings | {"compare_offline": compare_offline, "repeat": repeat},
        rows,
        [LoadTables(rows, title, limits)],
        lambda path, footnote: plot_load(path, title, footnote, runs, limits),
    )


@contextmanager
def _watch(name: str, count: int | None, *, enabled: bool) -> Iterator[LoadProgress]:
    with progress_bar(name, count, "done", enabled=enabled) as advance:
        yield lambda done, num_open, pieces: advance(done, pieces, f"{num_open:,} open, ")


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


def _facts(
    engine: EngineOptions, server: LoadTargetOptions, address: Address | None, model_given: bool
) -> tuple[str, Sequence[int], int | None]:
    """The model's name, the token ids of prompts, and the longest request if known."""
    words = range(len(WORDS)) if server.api == "chat" else None
    if address is None:
        vocabulary, limit = local_model_facts(engine.model, engine.config(), progress=not engine.quiet)
        return engine.model, words or vocabulary, limit
    ids = LengthRange.parse("token_ids", server.token_ids)
    drawn_from = words or range(ids.low, ids.high + 1)
    if model_given:
        return engine.model, drawn_from, None
    served = BlockingClient(address, api_key=server.api_key).served_model()
    longest = served.get("max_model_len")
    return str(served["id"]), drawn_from, longest if isinstance(longest, int) else None
