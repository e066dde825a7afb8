"""What prompt chunks cost those who are generating: fixed sizes against budgets that adapt.

Some requests generate all the while. Long prompts arrive one after the other, the next when the one before has its
first token, so that every measured step carries all decodes and a chunk. Throughput counts what was computed in that
time: prompt tokens and generated ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chairlift.bench.engines import EngineMaker
from chairlift.bench.measure import percentile
from chairlift.bench.timing import Note
from chairlift.core.events import BudgetDecided, Event, RequestFinished, StepDone, TokenProduced
from chairlift.core.sampling import SamplingParams
from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.execution.engine import Engine

# A target is met if the median of the inter-token times is inside it and their 99th percentile within this much of it.
ALLOWANCE = 1.2
CHUNKS = {"cpu": (16, 32, 64, 128, 256, 512), "cuda": (128, 256, 512, 1024, 2048, 4096)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingSettings:
    """Lengths are in tokens."""

    decodes: int = 8  # requests that generate all the while
    start: int = 32  # their prompts
    output: int = 512  # what each generates; then another takes its place
    prompts: int = 4  # long prompts that are measured
    prompt_len: int = 1024
    rounds: int = 1  # every setting is run so often, in turns
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "seed" else 1):
                raise InvalidParameter(name, f"must be at least {0 if name == 'seed' else 1}, got {value}")


@dataclass(slots=True)
class ChunkingRun:
    """What was seen while long prompts were computed. Times are seconds."""

    seconds: float = 0.0
    tokens: int = 0  # computed: prompt tokens and generated ones
    gaps: list[float] = field(default_factory=list)  # between consecutive tokens of those who generate
    first_tokens: list[float] = field(default_factory=list)  # how long the long prompts took to their first token
    steps: list[StepDone] = field(default_factory=list)
    decisions: list[BudgetDecided] = field(default_factory=list)

    def add(self, other: ChunkingRun) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.gaps += other.gaps
        self.first_tokens += other.first_tokens
        self.steps += other.steps
        self.decisions += other.decisions


@dataclass(frozen=True, slots=True)
class ChunkingPoint:
    """One setting and what came of it: a fixed `chunk`, a `target` for the time per output token, or the knee."""

    name: str
    run: ChunkingRun
    chunk: int | None = None
    target: float | None = None  # seconds

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
            "itl_max_ms": max(run.gaps) * 1e3,
            "ttft_p50_ms": percentile(run.first_tokens, 50) * 1e3,
            "ttft_max_ms": max(run.first_tokens) * 1e3,
            "tokens_per_s": self.tokens_per_s,
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
    points = [ChunkingPoint(f"chunk {chunk}", ChunkingRun(), chunk=chunk) for chunk in chunks]
    points += [ChunkingPoint(f"target {target * 1e3:g} ms", ChunkingRun(), target=target) for target in targets]
    points.append(ChunkingPoint("knee", ChunkingRun()))
    for round_number in range(settings.rounds):
        for point in points:
            note(f"{point.name}, round {round_number + 1} of {settings.rounds}")
            point.run.add(_run_point(maker, settings, point, largest))
    return points


def suggest_targets(maker: EngineMaker, settings: ChunkingSettings, chunks: Sequence[int]) -> list[float]:
    """What a smaller and a larger chunk need in the median, as round numbers: neither easy nor hopeless."""
    ordered = sorted(chunks)
    chosen = ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3]
    points = [ChunkingPoint("", ChunkingRun(), chunk=chunk) for chunk in chosen]
    gaps = [_run_point(maker, settings, point, max(chunks)).gaps for point in points]
    return sorted({float(f"{percentile(found, 50):.2g}") for found in gaps})


def _run_point(maker: EngineMaker, settings: ChunkingSettings, point: ChunkingPoint, largest: int) -> ChunkingRun:
    options: dict[str, Any] = {"max_prefill_tokens": point.chunk or largest}
    if point.target is not None:
        options["target_tpot_ms"] = point.target * 1e3
    elif point.chunk is None:
        options["budget"] = "knee"
    engine = engine_for_long_prompts(maker, settings, max_batch_tokens=largest, **options)
    return run_long_prompts(engine, maker.vocabulary(), settings)


def engine_for_long_prompts(
    maker: EngineMaker, settings: ChunkingSettings, *, max_batch_tokens: int, **options: Any
) -> Engine:
    """A seat and enough memory for everybody; `max_batch_tokens` beside the decodes."""
    seats, block_size = settings.decodes + 1, maker.config().block_size
    blocks = settings.decodes * -(-(settings.start + settings.output) // block_size)
    blocks += -(-(settings.prompt_len + 1) // block_size) + 2 * seats
    return maker.engine(
        max_batch_requests=seats,
        max_batch_tokens=max_batch_tokens + seats,
        kv_memory=maker.kv_memory(blocks),
        prefix_caching=False,
        **options,
    )


def run_long_prompts(
    engine: Engine, vocabulary: Sequence[int], settings: ChunkingSettings, *, warm_up: int | None = None
) -> ChunkingRun:
    """One prompt for warming up and learning (of `warm_up` tokens, or as long as the others), then those that count."""
    for parameter, needed in (
        ("prompt_len", settings.prompt_len + 1),
        ("output", settings.start + settings.output),
    ):
        if needed > engine.max_model_len:
            problem = f"{needed} tokens do not fit into the {engine.max_model_len} of this model"
            raise InvalidParameter(parameter, problem)
    traffic = _Traffic(engine, vocabulary, settings)
    traffic.start_decodes()
    traffic.serve_prompt(warm_up or settings.prompt_len)
    traffic.measured = ChunkingRun()
    begun = engine.now()
    for _ in range(settings.prompts):
        traffic.serve_prompt(settings.prompt_len)
    traffic.measured.seconds = engine.now() - begun
    traffic.stop()
    return traffic.measured


class _Traffic:
    """Keeps the same number of requests generating, and brings long prompts one by one."""

    def __init__(self, engine: Engine, vocabulary: Sequence[int], settings: ChunkingSettings) -> None:
        self._engine, self._vocabulary, self._settings = engine, vocabulary, settings
        self._source = random.Random(settings.seed)
        self._last_token: dict[str, float | None] = {}  # of those who generate
        self.measured = ChunkingRun()

    def start_decodes(self) -> None:
        """Have all of them on board and past their prompts."""
        for _ in range(self._settings.decodes):
            self._begin_decoding()
        while None in self._last_token.values():
            self._step()

    def serve_prompt(self, length: int) -> None:
        """Bring a prompt, and wait for its first token."""
        engine = self._engine
        begun = engine.now()
        (long_id,) = engine.submit(self._words(length), _generate(1))
        while True:
            done = [event for event in self._step() if isinstance(event, TokenProduced) and event.request_id == long_id]
            if done:
                self.measured.first_tokens.append(done[0].time - begun)
                return

    def stop(self) -> None:
        for request_id in self._last_token:
            self._engine.cancel(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _begin_decoding(self) -> None:
        words = self._words(self._settings.start)
        (request_id,) = self._engine.submit(words, _generate(self._settings.output))
        self._last_token[request_id] = None

    def _words(self, count: int) -> list[int]:
        return self._source.choices(self._vocabulary, k=count)

    def _step(self) -> list[Event]:
        events = self._engine.step()
        self._engine.check_alive()
        for event in events:
            match event:
                case TokenProduced() if event.request_id in self._last_token:
                    before = self._last_token[event.request_id]
                    if before is not None:
                        self.measured.gaps.append(event.time - before)
                    self._last_token[event.request_id] = event.time
                case RequestFinished() if event.request_id in self._last_token:
                    del self._last_token[event.request_id]
                    self._begin_decoding()
                case StepDone():
                    self.measured.steps.append(event)
                    self.measured.tokens += event.decode_tokens + event.prefill_tokens
                case BudgetDecided():
                    self.measured.decisions.append(event)
                case _:
                    pass
        return events


def _generate(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


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
