"""The cost of steps on this machine, for `chairlift simulate --profile`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import RequestFinished
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.progress import Note
from chairlift_lab.common.workload import LengthRange
from chairlift_lab.simulator.measured import MeasuredCost, Steps

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
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
            engine.submit(prompt, params)
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
