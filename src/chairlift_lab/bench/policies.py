"""Batching policies on the same requests, which arrive at once or as a Poisson process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import typer

from chairlift.attention.backends import BACKENDS
from chairlift.core.policies.base import POLICIES
from chairlift.errors import InvalidParameter
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, VariedEngineOptions, bench
from chairlift_lab.common.engines import EngineMaker, measure_engine
from chairlift_lab.common.workload import BenchRequest, SpreadLengths, Workload
from chairlift_lab.report.options import (
    Count,
    Plot,
    Positive,
    ReportOptions,
    Settings,
    each,
    number_list,
    parse_names,
    picture,
)

LONGEST = 8  # limit of output lengths, as a multiple of the mean
AT_ONCE, POISSON = "at-once", "poisson"
ARRIVALS = (AT_ONCE, POISSON)
_option = partial(typer.Option, rich_help_panel="Workload")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWorkload(Settings):
    """Requests whose output lengths vary.

    The batch is large compared to the arrival rate, as in most servers: filling a batch then takes time, which is the
    only difference between static and dynamic batches.
    """

    variations: Annotated[
        Sequence[float],
        each(at_least(0)),
        number_list("Variations of the output lengths: standard deviation / mean.", kind=float, panel="Workload"),
    ] = (0.2, 0.6, 1.2)
    requests: Annotated[Count, _option(help="Number of requests.")] = 64
    prompt: Annotated[Count, _option(help="Mean prompt tokens.")] = 24
    output: Annotated[Count, _option(help="Mean output tokens.")] = 20
    slots: Annotated[Count, _option("--concurrency", help="Requests per step.")] = 32
    load: Annotated[
        Positive, _option(help="Rate of Poisson arrivals, as a share of the throughput of continuous batching.")
    ] = 0.7
    seed: Annotated[int, _option(help="The same seed gives the same requests.")] = 0

    def workload(self, vocabulary: Sequence[int], variation: float) -> Workload:
        """The same prompts for every variation; only the output lengths differ."""
        prompts, outputs = (random.Random(f"{part} {self.seed}") for part in ("prompts", "outputs"))
        prompt = SpreadLengths(self.prompt, 0.5, LONGEST * self.prompt)
        output = SpreadLengths(self.output, variation, LONGEST * self.output)
        return Workload(
            tuple(
                BenchRequest(tuple(prompts.choices(vocabulary, k=prompt.draw(prompts))), output.draw(outputs))
                for _ in range(self.requests)
            )
        )

    def poisson(self, rate: float) -> list[float]:
        """Arrival times of a Poisson process, in seconds."""
        source = random.Random(f"arrivals {self.seed}")
        return list(accumulate((source.expovariate(rate) for _ in range(self.requests - 1)), initial=0.0))


@dataclass(frozen=True, slots=True)
class Strategy:
    """A batching policy and an attention backend."""

    policy: str
    attention: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """ "static", or "static/padded"."""
        policy, _, attention = text.strip().partition("/")
        strategy = cls(policy, attention or "auto")
        if policy not in POLICIES.names() or strategy.attention not in ("auto", *BACKENDS.names()):
            choices = f"{', '.join(POLICIES.names())}, each alone or with /{', /'.join(BACKENDS.names())}"
            raise InvalidParameter("strategies", f"there is no {text.strip()!r}; choose from {choices}")
        return strategy

    def __str__(self) -> str:
        return self.policy if self.attention == "auto" else f"{self.policy}/{self.attention}"


CONTINUOUS = Strategy("continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesSettings(PolicyWorkload):
    """Which strategies to compare, and on which arrivals."""

    strategies: Sequence[Strategy] = (CONTINUOUS, Strategy("dynamic"), Strategy("static"))
    arrivals: Sequence[str] = ARRIVALS
    max_delay_ms: float | None = None  # Dynamic batches wait at most this long.

    def __post_init__(self) -> None:
        PolicyWorkload.__post_init__(self)
        parse_names("arrivals", ",".join(self.arrivals), ARRIVALS)
        if not self.strategies or len(set(self.strategies)) < len(self.strategies):
            raise InvalidParameter("strategies", "must name each strategy once")


def compare_policies(
    maker: EngineMaker, settings: PoliciesSettings, *, note: Note = lambda text: None
) -> list[dict[str, Any]]:
    """A row for each variation, kind of arrivals and strategy, in this order."""

    def measure(strategy: Strategy, rate: float | None) -> dict[str, Any]:
        arrivals = AT_ONCE if rate is None else POISSON
        note(f"{strategy}, {arrivals}, length variation {variation:g}")
        engine = maker.engine(
            policy=strategy.policy,
            attention=strategy.attention,
            max_delay_ms=settings.max_delay_ms if strategy.policy == "dynamic" else None,
            max_batch_requests=settings.slots,
            prefix_caching=False,  # random prompts have no common prefixes
        )
        times = None if rate is None else settings.poisson(rate)
        measurement = measure_engine(engine, workload, lambda tokens: None, times)
        return measurement.row(f"{strategy}, {arrivals}, variation {variation:g}") | {
            "strategy": str(strategy),
            "policy": strategy.policy,
            "attention": strategy.attention,
            "arrivals": arrivals,
            "variation": variation,
            "rate": rate,
        }

    rows: list[dict[str, Any]] = []
    vocabulary = maker.vocabulary()
    for variation in settings.variations:
        workload = settings.workload(vocabulary, variation)
        reference: dict[str, Any] | None = None  # continuous batching of all requests at once: a load of 1
        for arrivals in settings.arrivals:
            rate = None
            if arrivals == POISSON:
                reference = reference or measure(CONTINUOUS, None)
                rate = settings.load * settings.requests / reference["seconds"]
            for strategy in settings.strategies:
                rows.append(measure(strategy, rate))
                if rate is None and strategy == CONTINUOUS:
                    reference = rows[-1]
    return rows


FIGURES = (
    ("throughput", "output tokens/s", "output_tokens_per_s", 1.0),
    ("p99 latency", "seconds", "latency_p99_ms", 1e-3),
    ("useful tokens", "%", "useful_token_share", 100.0),
)


def policy_panels(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Throughput, latency and useful tokens, for each kind of arrivals."""
    ordered = sorted(rows, key=lambda row: row["variation"])
    return [
        Plot(
            title=f"{PANEL_TITLES[arrivals]}: {name}",
            rows=[row for row in ordered if row["arrivals"] == arrivals],
            x="variation",
            y=key,
            series="strategy",
            factor=factor,
            x_label="variation of the output lengths (standard deviation / mean)",
            y_label=unit,
        )
        for arrivals in dict.fromkeys(row["arrivals"] for row in rows)
        for name, unit, key, factor in FIGURES
    ]


PANEL_TITLES = {AT_ONCE: "All at once", POISSON: "Poisson arrivals"}
TABLE_TITLES = {AT_ONCE: "All requests at once", POISSON: "Poisson arrivals"}
COLUMNS = (
    Column("Strategy", "strategy"),
    Column("Spread", "variation", "g"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
    Column("Useful\ntokens", "useful_token_share", ".0%"),
    Column("Latency\np50 s", "latency_p50_ms", ".2f", factor=1e-3),
    Column("Latency\np99 s", "latency_p99_ms", ".2f", factor=1e-3),
    Column("Batch\nmean", "mean_batch_requests", ".1f"),
)
CAPTION = "Spread: standard deviation / mean of the output lengths. Batch: requests per step"


@bench(
    "policies",
    "chairlift bench policies",
    "chairlift bench policies --strategies continuous,continuous/padded,static/padded --arrivals at-once",
    report=ReportOptions,
)
def bench_policies(
    context: typer.Context,
    engine: VariedEngineOptions,
    workload: PolicyWorkload,
    note: Note,
    strategies: Annotated[
        str, typer.Option(help="Batching policies, each alone or with an attention backend (static/padded).")
    ] = "continuous,dynamic,static",
    arrivals: Annotated[str, _option(help="Arrivals: at-once, poisson or both.")] = "at-once,poisson",
) -> BenchResult:
    """Batching policies on the same requests, for several variations of the output lengths.

    Requests arrive at once, where static and dynamic batching are the same, and
    as a Poisson process, where a static batch waits until it is full. Latency is
    from a request's arrival to its last token.
    """
    refuse_given(context, ("policy", "attention"), "is compared by this bench; see --strategies")
    refuse_given(context, ("max_batch_requests",), "is called --concurrency here")
    refuse_given(context, ("prefix_caching",), "has no effect: the prompts of this bench have no common prefixes")
    settings = PoliciesSettings(
        strategies=[Strategy.parse(text) for text in strategies.split(",")],
        arrivals=parse_names("arrivals", arrivals, ARRIVALS),
        max_delay_ms=engine.max_delay_ms,
        **asdict(workload),
    )
    maker = EngineMaker.from_options(engine, note, max_delay_ms=None)
    rows = compare_policies(maker, settings, note=note)
    tables = [
        Table(TABLE_TITLES[each], COLUMNS, [row for row in rows if row["arrivals"] == each], CAPTION)
        for each in dict.fromkeys(row["arrivals"] for row in rows)
    ]
    return BenchResult(
        maker.settings() | asdict(settings) | {"strategies": [str(strategy) for strategy in settings.strategies]},
        rows,
        tables,
        picture("Batching strategies", policy_panels(rows), columns=3),
    )
