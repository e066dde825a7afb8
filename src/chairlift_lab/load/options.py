"""The options of `chairlift bench serve`: the load, the requests, the server and the limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.options import above, at_least
from chairlift_lab.common.workload import BenchRequest, LengthRange, SharedPrefixes, draw_requests, load_workload
from chairlift_lab.load.client import APIS, ClosedLoop, LoadLoop, OpenLoop, RequestFormat
from chairlift_lab.load.traces import ARRIVALS, Arrivals, TraceEntry, load_trace, trace_requests
from chairlift_lab.report.options import Positive, Settings

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
class LoadWorkload(Settings):
    """The requests: random, from a file, or like a trace."""

    prompt_len: Annotated[str, _workload(metavar="LOW:HIGH", help="Prompt tokens, log-uniform, or one number.")] = (
        "16:512"
    )
    output_len: Annotated[str, _workload(metavar="LOW:HIGH", help="Output tokens, log-uniform, or one number.")] = (
        "16:256"
    )
    seed: Annotated[int, _workload(help="The same seed gives the same requests.")] = 0
    shared_prefix: Annotated[float, _workload(help="Share of every prompt that is a common prefix.")] = 0.0
    prefix_groups: Annotated[int, _workload(help="Number of different common prefixes.")] = 1
    workload: Annotated[
        Path | None,
        _workload(help='Read the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.'),
    ] = None
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

    def recorded(self) -> list[TraceEntry] | None:
        if self.trace is None:
            return None
        return [entry.scaled(self.trace_scale, self.trace_speed) for entry in load_trace(self.trace)]

    def available(self, recorded: Sequence[TraceEntry] | None) -> int | None:
        """The number of requests of the file or trace; None for random ones."""
        if self.workload is not None:
            return len(load_workload(self.workload).requests)
        return None if recorded is None else len(recorded)

    def longest(self) -> int:
        """The most tokens of a request, prompt and output; 0 for a trace, whose entries are filtered later."""
        if self.workload is not None:
            return load_workload(self.workload).longest
        if self.trace is not None:
            return 0
        lengths = (("prompt_len", self.prompt_len), ("output_len", self.output_len))
        return sum(LengthRange.parse(name, text).high for name, text in lengths)

    def requests(self, vocabulary: Sequence[int], recorded: Sequence[TraceEntry] | None, count: int | None) -> Requests:
        if self.workload is not None:
            read = load_workload(self.workload).requests[:count]
            return lambda: iter(read)
        if recorded is not None:
            entries = recorded[:count]
            return lambda: trace_requests(vocabulary, entries, seed=self.seed, lengths=self.trace_scale)
        draw = self._drawn(vocabulary)
        return lambda: islice(draw(), count)

    def _drawn(self, vocabulary: Sequence[int]) -> Requests:
        prompt_len = LengthRange.parse("prompt_len", self.prompt_len)
        output_len = LengthRange.parse("output_len", self.output_len)
        shared = SharedPrefixes(self.shared_prefix, self.prefix_groups)
        return lambda: draw_requests(
            vocabulary, prompt_len=prompt_len, output_len=output_len, seed=self.seed, shared=shared
        )


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
