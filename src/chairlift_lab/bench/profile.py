"""The cost of steps on this machine, for chairlift simulate --profile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.config import EngineConfig
from chairlift.core.budgets.base import default_budget
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import RequestFinished
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, given, refuse_given
from chairlift.terminal.tables import Column, Line, Table, comparison_table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.timing import OtherPrograms
from chairlift_lab.common.workload import LengthRange, full_length
from chairlift_lab.planning.prediction import ReplicaSettings
from chairlift_lab.planning.recording import RunOptions, RunRecorder, compare
from chairlift_lab.report.options import check_writable, machine
from chairlift_lab.simulator.step_cost import MeasuredCost, Steps

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

LONGEST_PROMPT, LONGEST_OUTPUT = 512, 24
RELAY = 8  # requests that arrive one by one


@dataclass(frozen=True, slots=True)
class CostProfile:
    steps: Steps
    cost: MeasuredCost
    error: float  # median of |measured - predicted| / predicted over all steps

    @classmethod
    def of(cls, steps: Steps) -> CostProfile:
        cost = MeasuredCost.fit(steps)
        return cls(steps, cost, median(cost.errors(steps)))

    def to_json(self) -> dict[str, Any]:
        return {"prices": self.cost.to_json(), "steps": len(self.steps), "error": self.error}


def measure_profile(
    engine: Engine, *, rounds: int, note: Note, seed: int = 0, between: Callable[[float], None] = lambda share: None
) -> CostProfile:
    """Run batches of all sizes with prompts of all lengths, and fit a cost model to their steps.

    `between` is called between batches with the completed share; steps that it runs on the engine do not count.
    """
    rng = random.Random(seed)
    slots = engine.scheduler.max_batch_requests
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if size < slots] + [slots]
    prompts = LengthRange(1, max(1, min(LONGEST_PROMPT, engine.max_model_len // 2)))
    for size in (1, min(8, slots)):  # warm-up
        _relay(engine, size, prompts, rng)
    watched = BackToBackCost(engine.now)
    # In random order, so that a slow phase of the machine does not affect the large batches alone.
    batches = [size for _ in range(rounds) for size in rng.sample(sizes, len(sizes))]
    for done, size in enumerate(batches):
        note(f"profile: {done} of {len(batches)} batches done, now one of {size} requests")
        between(done / len(batches))
        engine.cost_model = watched
        watched.pause()
        _relay(engine, size, prompts, rng)
        engine.check_alive()
    between(1.0)
    return CostProfile.of(watched.steps)


def _relay(engine: Engine, size: int, prompts: LengthRange, rng: random.Random) -> None:
    """`size` requests at once, so that prompts fill whole steps, then another whenever one ends, as in traffic."""
    coming, in_flight = size + RELAY, 0
    while coming or engine.has_work:
        while coming and in_flight < size:
            prompt = [rng.randrange(engine.vocab_size) for _ in range(prompts.draw(rng))]
            count = min(rng.randint(2, LONGEST_OUTPUT), engine.max_model_len - len(prompt))
            engine.submit(prompt, full_length(count))
            coming, in_flight = coming - 1, in_flight + 1
        engine.expect_no_more()
        in_flight -= sum(isinstance(event, RequestFinished) for event in engine.step())


def watch_steps(engine: Engine) -> WatchedCost:
    """Record every step of `engine`."""
    engine.cost_model = watched = WatchedCost()
    return watched


class WatchedCost(CostModel):
    """A cost model that keeps all observed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[StepShape, float]] = []

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.steps.append((shape, seconds))
        super().observe(shape, seconds)


class BackToBackCost(WatchedCost):
    """Counts the time since the end of the previous step as part of a step.

    Between two steps the engine publishes events and its driver reads them, which is part of what a step costs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._last: float | None = None  # when the last step was over

    def pause(self) -> None:
        """The next step does not begin where the last one ended."""
        self._last = None

    def observe(self, shape: StepShape, seconds: float) -> None:
        last, self._last = self._last, self._clock()
        super().observe(shape, seconds if last is None else self._last - last)


@bench(
    "profile",
    "chairlift bench profile --out profile.json",
    "chairlift bench profile --model path/to/model --out profile.json",
    "chairlift simulate --profile profile.json --rate 1",
    report=None,
)
def bench_profile(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")] = Path("profile.json"),
    rounds: Annotated[int, typer.Option(help="Rounds; more of them give better figures.")] = 3,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Also record a run with traffic in the profile, and compare the simulator with it."
        ),
    ] = False,
    *,
    traffic: RunOptions,
) -> BenchResult:
    """Measure what steps cost on this machine, for chairlift simulate --profile.

    With --record, the error of the simulator is measured as well; chairlift
    simulate --against FILE repeats that comparison without a model.
    """
    from chairlift.engine.startup import load_engine

    if rounds < 1:
        raise InvalidParameter("rounds", f"must be at least 1, got {rounds}")
    if not record:
        refuse_given(context, RunOptions.__slots__, "only goes with --record")
    elif given(context, "max_delay_ms"):
        raise InvalidParameter("max_delay_ms", "cannot be simulated; only the policy's default can")
    refuse_given(context, ("budget", "target_tpot_ms", "target_ttft_ms"), "a profile needs steps of all sizes")
    check_writable(out, parameter="out")
    config = EngineConfig(**engine.config())
    note("loading")
    started = load_engine(engine.model, config, progress=not engine.quiet).engine
    replica = _replica(started, config)
    others, run = OtherPrograms(), None
    if record:
        note("estimating the throughput of the machine")
        recorder = RunRecorder(started, replica, measure_profile(started, rounds=1, note=note).cost, traffic)
        profile = measure_profile(started, rounds=rounds, note=note, seed=1, between=recorder.keep_up)
        run = recorder.recorded(profile.cost)
    else:
        profile = measure_profile(started, rounds=rounds, note=note)
    disturbance = others.share()
    saved = profile.to_json() | {"settings": _settings(engine.model, replica), "machine": machine()}
    saved["other_programs"] = disturbance  # their share of all processor time meanwhile
    if run is not None:
        saved["run"] = run.to_json()
    out.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    compared = [] if run is None else [comparison_table(compare(run))]
    return BenchResult({}, [], [_prices(profile, disturbance), *compared, Line(f"Written to {out}")])


def _settings(model: str, replica: ReplicaSettings) -> dict[str, Any]:
    return {
        "model": model,
        "kv_blocks": replica.num_blocks,
        "max_batch_requests": replica.slots,
        "max_batch_tokens": replica.max_batch_tokens,
    }


def _replica(engine: Engine, config: EngineConfig) -> ReplicaSettings:
    """A simulated engine that schedules as this one does."""
    from chairlift.engine.settings import resolve_machine

    scheduler = engine.scheduler
    return ReplicaSettings(
        num_blocks=scheduler.kv.num_blocks,
        block_size=scheduler.kv.block_size,
        slots=scheduler.max_batch_requests,
        max_batch_tokens=resolve_machine(config).max_batch_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        policy=config.policy,
        order=config.order,
        budget=default_budget(config.make_ordering().own_budget, has_target=False),
    )


def _prices(profile: CostProfile, disturbance: float | None) -> Table:
    cost = profile.cost
    meanwhile = "" if disturbance is None else f"; other programs used {disturbance:.1%} of the processors meanwhile"
    rows = [("step", cost.step), ("request", cost.request)]
    rows += [(f"token, after the first {bend}" if bend else "first token", price) for bend, price in cost.tokens]
    rows += [("position read by a prompt", cost.prefill_kv), ("position read by a decode", cost.decode_kv)]
    columns = [Column("", lambda row: row[0]), Column("", lambda row: row[1], ",.3f", factor=1e6)]
    caption = f"{len(profile.steps):,} steps; typical error {profile.error:.1%}{meanwhile}"
    return Table("Microseconds per", columns, rows, caption)
