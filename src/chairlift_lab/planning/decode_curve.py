"""The predicted duration of a decode step by batch size."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.core.cost_model import StepShape
from chairlift_lab.simulator.roofline import StepCost


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch size of the curve."""

    batch: int  # requests, each of which decodes one token
    seconds: float  # of the step

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def decode_curve(cost: StepCost, context: int, largest: int) -> list[DecodePoint]:
    """Decode steps of 1, 2, 4, … `largest` requests with `context` tokens each."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    return [DecodePoint(size, cost.predict(_decode_step(size, context))) for size in sizes]


def _decode_step(batch: int, context: int) -> StepShape:
    return StepShape(decode_tokens=batch, decode_kv=batch * context, requests=batch)
