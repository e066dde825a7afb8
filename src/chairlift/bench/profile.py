"""What steps cost on this machine, for `chairlift simulate --profile`."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.bench.report import machine
from chairlift.bench.timing import Note
from chairlift.core.sampling import SamplingParams
from chairlift.execution.engine import Engine


@dataclass(frozen=True, slots=True)
class Profile:
    coefficients: dict[str, float]
    steps: int
    error: float  # median of |measured - predicted| / predicted over the steps at the end

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        saved = {"coefficients": self.coefficients, "steps": self.steps, "error": self.error}
        path.write_text(json.dumps(saved | {"settings": settings, "machine": machine()}, indent=2) + "\n")


def measure_profile(engine: Engine, *, rounds: int, note: Note, seed: int = 0) -> Profile:
    """Run batches of all sizes up to the seats, with prompts of all lengths, and fit what their steps took."""
    rng = random.Random(seed)
    seats = engine.scheduler.max_batch_requests
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < seats] + [seats]
    longest = max(1, min(512, engine.max_model_len // 2))
    for turn in range(rounds):
        for size in sizes:
            note(f"round {turn + 1} of {rounds}: {size} requests")
            for _ in range(size):
                prompt = [rng.randrange(engine.vocab_size) for _ in range(rng.randint(1, longest))]
                count = rng.randint(2, 24)
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
                engine.submit(prompt, params)
            while engine.has_work:
                engine.step()
            engine.check_alive()
    learned = engine.cost_model
    return Profile(learned.coefficients, learned.num_observed, learned.error)
