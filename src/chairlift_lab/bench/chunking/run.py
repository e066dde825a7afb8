"""The cost of prompt chunks for decoding requests: fixed sizes against adaptive budgets.

Throughput counts what was computed while long prompts arrived: prompt tokens and generated ones.

Every setting has an engine of its own. The engines take turns prompt by prompt, each on a clock that stops between its
turns, so that changes of the machine's speed affect all of them. On a GPU, a step that is in flight when a turn ends
runs in the next turn: one step per turn is not counted, which only matters with few and long steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.bench.chunking.long_prompts import (
    ChunkingRun,
    LongPrompts,
    TurnClock,
    engine_for_long_prompts,
)
from chairlift_lab.bench.chunking.options import ChunkingSettings
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.measure import percentile

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
    _check_chunks(chunks)
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
        for point, turn in zip(points, turns, strict=True):
            note(f"{which}: prompt {prompt + 1} of {settings.prompts}, {point.name}")
            with turn.clock:
                turn.traffic.measure_prompt()
    for point, turn in zip(points, turns, strict=True):
        turn.traffic.stop()
        point.rounds.append(turn.traffic.measured)


def suggest_targets(maker: EngineMaker, settings: ChunkingSettings, chunks: Sequence[int]) -> list[float]:
    """What a smaller and a larger chunk need in the median, as round numbers: neither easy nor hopeless."""
    ordered = sorted(chunks)
    chosen = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
    points = [ChunkingPoint("", chunk=chunk) for chunk in chosen]
    _run_round(maker, settings, points, max(chunks), lambda text: None, "")
    return sorted({float(f"{percentile(point.run.gaps, 50):.2g}") for point in points})


class _Turn(NamedTuple):
    clock: TurnClock
    traffic: LongPrompts


def _begin(maker: EngineMaker, settings: ChunkingSettings, point: ChunkingPoint, largest: int) -> _Turn:
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
    return _Turn(clock, traffic)


def best_fixed(points: Sequence[ChunkingPoint], target: float) -> ChunkingPoint | None:
    """The fixed chunk with the highest throughput among those that meet the target by the rule that adaptive ones
    are held to; None if there is none."""
    valid = [point for point in points if point.chunk is not None and point.meets(target)]
    return max(valid, key=lambda point: point.tokens_per_s, default=None)


def chunking_rows(points: Sequence[ChunkingPoint]) -> list[dict[str, Any]]:
    return [point.row(None if point.target is None else best_fixed(points, point.target)) for point in points]


def _check_chunks(chunks: Sequence[int]) -> None:
    if not chunks or min(chunks) < 1 or len(set(chunks)) < len(chunks):
        raise InvalidParameter("chunks", f"must be different numbers of at least 1, got {list(chunks)}")
