"""What steps cost on this machine, for `chairlift simulate --profile`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from chairlift.bench.timing import Note
from chairlift.bench.workload import LengthRange
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.sampling import SamplingParams
from chairlift.execution.engine import Engine
from chairlift.simulate.measured import MeasuredCost

LONGEST_PROMPT, LONGEST_OUTPUT = 512, 24


@dataclass(frozen=True, slots=True)
class Profile:
    cost: MeasuredCost
    steps: int
    error: float  # median of |measured - predicted| / predicted over all steps

    def to_json(self) -> dict[str, Any]:
        return {"prices": self.cost.to_json(), "steps": self.steps, "error": self.error}


def measure_profile(engine: Engine, *, rounds: int, note: Note, seed: int = 0) -> Profile:
    """Run batches of all sizes up to the seats, with prompts of all lengths, and fit what their steps took."""
    rng = random.Random(seed)
    seats = engine.scheduler.max_batch_requests
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if size < seats] + [seats]
    prompts = LengthRange(1, max(1, min(LONGEST_PROMPT, engine.max_model_len // 2)))
    watched = watch_steps(engine)
    for turn in range(-1, rounds):
        if turn == 0:
            watched.steps.clear()  # the first, uncounted, warms up caches and kernels
        for size in sizes if turn >= 0 else (1, min(8, seats)):
            note(f"round {turn + 1} of {rounds}: {size} requests")
            for _ in range(size):
                prompt = [rng.randrange(engine.vocab_size) for _ in range(prompts.draw(rng))]
                count = min(rng.randint(2, LONGEST_OUTPUT), engine.max_model_len - len(prompt))
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
                engine.submit(prompt, params)
            engine.expect_no_more()
            while engine.has_work:
                engine.step()
            engine.check_alive()
    cost = MeasuredCost.fit(watched.steps)
    return Profile(cost, len(watched.steps), median(cost.errors(watched.steps)))


def watch_steps(engine: Engine) -> WatchedCost:
    """Have every step of `engine` written down."""
    engine.cost_model = WatchedCost()
    return engine.cost_model


class WatchedCost(CostModel):
    """The engine tells its cost model of every step; this one keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[StepShape, float]] = []

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.steps.append((shape, seconds))
        super().observe(shape, seconds)
