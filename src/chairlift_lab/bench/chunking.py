"""The cost of prompt chunks for decoding requests: fixed sizes against adaptive budgets.

Throughput counts what was computed while long prompts arrived: prompt tokens and generated ones.

Every setting has an engine of its own. The engines take turns prompt by prompt, each on a clock that stops between its
turns, so that changes of the machine's speed affect all of them. On a GPU, a step that is in flight when a turn ends
runs in the next turn: one step per turn is not counted, which only matters with few and long steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import EngineMaker, percentile
from chairlift_lab.common.long_prompts import (
    ChunkingRun,
    ChunkingSettings,
    LongPrompts,
    TurnClock,
    engine_for_long_prompts,
)
from chairlift_lab.report.options import PlotPanel, ReportOptions, number_list, save_panels

# A target is met if the median of the inter-token times is inside it and their 99th percentile within this much of it.
ALLOWANCE = 1.2
CHUNKS = {"cpu": (16, 32, 64, 128, 256, 512), "cuda": (128, 256, 512, 1024, 2048, 4096)}


@dataclass(frozen=True)
class ChunkingPoint:
    """One setting and its runs: a fixed `chunk`, a `target` for the time per output token, or the knee."""

    name: str
    rounds: list[ChunkingRun] = field(default_factory=list)
    chunk: int | None = None
    target: float | None = None  # seconds

    @cached_property
    def run(self) -> ChunkingRun:
        """All rounds together."""
        whole = ChunkingRun()
        for one in self.rounds:
            whole.add(one)
        return whole

    @property
    def p99(self) -> float:
        return percentile(self.run.gaps, 99)

    @property
    def tokens_per_s(self) -> float:
        return self.run.tokens / self.run.seconds

    def meets(self, target: float) -> bool:
        return percentile(self.run.gaps, 50) <= target and self.p99 <= ALLOWANCE * target

    def row(self, best: ChunkingPoint | None = None) -> dict[str, Any]:
        """`best`: the fixed chunk with the highest throughput among those that meet this point's target."""
        run, steps = self.run, self.run.steps
        errors = [abs(s.predicted_seconds - s.seconds) / s.seconds for s in steps if s.predicted_seconds and s.seconds]
        return {
            "name": self.name,
            "chunk": self.chunk,
            "target_ms": self.target and self.target * 1e3,
            "itl_p50_ms": percentile(run.gaps, 50) * 1e3,
            "itl_p99_ms": self.p99 * 1e3,
            "itl_p99_ms_rounds": [percentile(one.gaps, 99) * 1e3 for one in self.rounds],
            "itl_max_ms": max(run.gaps) * 1e3,
            "ttft_p50_ms": percentile(run.first_tokens, 50) * 1e3,
            "ttft_max_ms": max(run.first_tokens) * 1e3,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_rounds": [one.tokens / one.seconds for one in self.rounds],
            "steps": len(steps),
            "mean_chunk": sum(step.prefill_tokens for step in steps) / len(steps),
            "prediction_error_p50": percentile(errors, 50) if errors else None,
            "decisions": len(run.decisions),
            "meets_target": None if self.target is None else self.meets(self.target),
            "best_fixed": best and best.chunk,
            "throughput_vs_best_fixed": best and self.tokens_per_s / best.tokens_per_s,
        }


def sweep_chunks(
    maker: EngineMaker,
    settings: ChunkingSettings,
    *,
    chunks: Sequence[int],
    targets: Sequence[float] | None = None,
    note: Note = lambda text: None,
) -> list[ChunkingPoint]:
    """Every fixed chunk, every target (in seconds; two are suggested if there are none), and the knee, in turns."""
    if not chunks or min(chunks) < 1 or len(set(chunks)) < len(chunks):
        raise InvalidParameter("chunks", f"must be different numbers of at least 1, got {list(chunks)}")
    largest = max(chunks)
    if not targets:
        note("finding two targets")
        targets = suggest_targets(maker, replace(settings, prompts=1), chunks)
    points = [ChunkingPoint(f"chunk {chunk}", chunk=chunk) for chunk in chunks]
    points += [ChunkingPoint(f"target {target * 1e3:g} ms", target=target) for target in targets]
    points.append(ChunkingPoint("knee"))
    for round_number in range(settings.rounds):
        _run_round(maker, settings, points, largest, note, f"round {round_number + 1} of {settings.rounds}")
    return points


def _run_round(
    maker: EngineMaker,
    settings: ChunkingSettings,
    points: Sequence[ChunkingPoint],
    largest: int,
    note: Note,
    which: str,
) -> None:
    """One prompt of each setting, then the next of each."""
    note(f"{which}: warming up")
    turns = [_begin(maker, settings, point, largest) for point in points]
    for prompt in range(settings.prompts):
        for point, (clock, traffic) in zip(points, turns, strict=True):
            note(f"{which}: prompt {prompt + 1} of {settings.prompts}, {point.name}")
            with clock:
                traffic.measure_prompt()
    for point, (_, traffic) in zip(points, turns, strict=True):
        traffic.stop()
        point.rounds.append(traffic.measured)


def suggest_targets(maker: EngineMaker, settings: ChunkingSettings, chunks: Sequence[int]) -> list[float]:
    """What a smaller and a larger chunk need in the median, as round numbers: neither easy nor hopeless."""
    ordered = sorted(chunks)
    chosen = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
    points = [ChunkingPoint("", chunk=chunk) for chunk in chosen]
    _run_round(maker, settings, points, max(chunks), lambda text: None, "")
    return sorted({float(f"{percentile(point.run.gaps, 50):.2g}") for point in points})


def _begin(
    maker: EngineMaker, settings: ChunkingSettings, point: ChunkingPoint, largest: int
) -> tuple[TurnClock, LongPrompts]:
    options: dict[str, Any] = {"max_prefill_tokens": point.chunk or largest}
    if point.target is not None:
        options["target_tpot_ms"] = point.target * 1e3
    elif point.chunk is None:
        options["budget"] = "knee"
    clock = TurnClock()
    engine = engine_for_long_prompts(maker, settings, max_batch_tokens=largest, clock=clock, **options)
    traffic = LongPrompts(engine, maker.vocabulary(), settings)
    with clock:
        traffic.warm_up(settings.prompt_len)
    return clock, traffic


def best_fixed(points: Sequence[ChunkingPoint], target: float) -> ChunkingPoint | None:
    """The fixed chunk with the highest throughput among those that meet the target by the rule that adaptive ones
    are held to; None if there is none."""
    valid = [point for point in points if point.chunk is not None and point.meets(target)]
    return max(valid, key=lambda point: point.tokens_per_s, default=None)


def chunking_rows(points: Sequence[ChunkingPoint]) -> list[dict[str, Any]]:
    return [point.row(None if point.target is None else best_fixed(points, point.target)) for point in points]


_FIXED, _KNEE, _TARGETS = "tab:grey", "tab:green", ("tab:blue", "tab:red", "tab:purple", "tab:orange")


def plot_chunking(path: Path, points: Sequence[ChunkingPoint], footnote: str) -> None:
    rows = chunking_rows(points)
    fixed = sorted((row for row in rows if row["chunk"] is not None), key=lambda row: row["chunk"])
    adaptive = [row for row in rows if row["chunk"] is None]
    targets = [row for row in adaptive if row["target_ms"] is not None]
    colours = {row["name"]: _TARGETS[index % len(_TARGETS)] for index, row in enumerate(targets)}

    def scatter(axes: Any, title: str, y_label: str, key: str, scale: float) -> None:
        """Every setting by its inter-token time; fixed chunks are joined by a line."""
        x, y = [row["itl_p99_ms"] for row in fixed], [row[key] * scale for row in fixed]
        axes.plot(x, y, "o-", color=_FIXED, label="fixed chunks")
        for row, one_x, one_y in zip(fixed, x, y, strict=True):
            axes.annotate(str(row["chunk"]), (one_x, one_y), (3, 5), textcoords="offset points", fontsize=7)
        for row in adaptive:
            place = [row["itl_p99_ms"]], [row[key] * scale]
            axes.plot(*place, "*", markersize=13, color=colours.get(row["name"], _KNEE), label=row["name"])
        for row in targets:
            axes.axvline(ALLOWANCE * row["target_ms"], color=colours[row["name"]], linestyle=":", linewidth=1)
        _plain_logarithm(axes)
        x_label = f"inter-token time, 99th percentile, ms (dotted: {ALLOWANCE:g} x target)"
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)

    def distribution(axes: Any) -> None:
        for point in points:
            gaps = sorted(point.run.gaps)
            shares = [(index + 1) / len(gaps) for index in range(len(gaps))]
            kind = {"color": _FIXED, "linewidth": 0.8} if point.chunk else {"color": colours.get(point.name, _KNEE)}
            axes.plot([gap * 1e3 for gap in gaps], shares, **kind, label=None if point.chunk else point.name)
        _plain_logarithm(axes)
        title, y_label = "Inter-token times of running requests", "share of tokens that came faster"
        axes.set(title=title, xlabel="ms (grey: fixed chunks)", ylabel=y_label)
        axes.legend(fontsize=8)

    def decisions(axes: Any) -> None:
        for point in points:
            if point.chunk is None:
                chunks = [step.prefill_tokens for step in point.run.steps]
                colour = colours.get(point.name, _KNEE)
                axes.plot(chunks, ".-", color=colour, linewidth=0.7, markersize=3, label=point.name)
        axes.set(title="Prompt tokens of each step", xlabel="step")
        axes.legend(fontsize=8)

    panels: list[PlotPanel] = [
        lambda axes: scatter(axes, "Throughput", "tokens/s, prompts and outputs", "tokens_per_s", 1.0),
        lambda axes: scatter(axes, "Time to first token of the long prompts", "seconds, median", "ttft_p50_ms", 1e-3),
        distribution,
        decisions,
    ]
    save_panels(path, "Prompt chunks beside decoding requests", footnote, panels)


def _plain_logarithm(axes: Any) -> None:
    """Numbers such as 20, 50 and 100 below a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


CHOSEN_HERE = (
    *("budget", "target_tpot_ms", "target_ttft_ms", "max_batch_tokens", "max_prefill_tokens"),
    *("max_batch_requests", "kv_memory", "memory_share", "prefix_caching"),
)
COLUMNS = (
    Column("", "name"),
    Column("ITL\np50 ms", "itl_p50_ms", ".3g"),
    Column("ITL\np99 ms", "itl_p99_ms", ".3g"),
    Column("TTFT\np50 s", "ttft_p50_ms", ".2f", factor=1e-3),
    Column("Tokens\nper s", "tokens_per_s", ",.0f"),
    Column("Mean\nchunk", "mean_chunk", ".0f"),
    Column("Target met?\nOf best fixed", lambda row: _verdict(row)),
)
CAPTION = (
    "ITL: between tokens of decoding requests. TTFT: of the long prompts.\nTokens: prompts and outputs. Best "
    "fixed: the highest throughput\nof all fixed chunks that meet the same target"
)


@bench(
    "chunking",
    "chairlift bench chunking",
    "chairlift bench chunking --targets-ms 100,200 --plot chunking.png",
    report=ReportOptions,
)
def bench_chunking(
    context: typer.Context,
    engine: EngineOptions,
    settings: ChunkingSettings,
    note: Note,
    chunks: Annotated[
        Sequence[int] | None,
        number_list("Fixed chunk sizes, in tokens.", default="16 to 512 on a CPU, 128 to 4096 on a GPU"),
    ] = None,
    targets_ms: Annotated[
        Sequence[float] | None,
        number_list("Targets for the time per output token.", kind=float, default="two, from the machine's speed"),
    ] = None,
) -> BenchResult:
    """Long prompts that arrive beside decoding requests: fixed chunks against adaptive token budgets.

    A target is met if the median inter-token time of the decoding requests is
    within it and the 99th percentile within 1.2 x of it. The throughput of an
    adaptive budget is compared with the highest of all fixed chunks that meet
    the same target by the same rule.
    """
    from chairlift.engine.settings import resolve_machine

    refuse_given(context, CHOSEN_HERE, "is chosen by this bench")
    targets = None if targets_ms is None else [ms / 1e3 for ms in targets_ms]
    maker = EngineMaker.from_options(engine, note)
    sizes = chunks or CHUNKS[resolve_machine(maker.config()).device.type]
    points = sweep_chunks(maker, settings, chunks=sizes, targets=targets, note=note)
    rows = chunking_rows(points)
    used = [row["target_ms"] for row in rows if row["target_ms"] is not None]
    return BenchResult(
        maker.settings() | asdict(settings) | {"chunks": sizes, "targets_ms": used},
        rows,
        [Table("Prompt chunks beside decoding requests", COLUMNS, rows, CAPTION)],
        lambda path, footnote: plot_chunking(path, points, footnote),
    )


def _verdict(row: Mapping[str, Any]) -> str:
    if row["meets_target"] is None:
        return ""
    met = "yes" if row["meets_target"] else "no"
    return f"{met}, {row['throughput_vs_best_fixed']:.0%} of {row['best_fixed']}" if row["best_fixed"] else met
