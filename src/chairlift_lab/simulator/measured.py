"""The duration of a step, fitted to measured steps.

    seconds ≈ step + Σ price of each token by its place in the step + a·requests + b·KV of prompts + c·KV of decodes

The price per token is piecewise constant between powers of two, because the cost of small matrix products varies
between machines. The engine's `CostModel` has fewer bends, since it learns online; a profile has all steps at once.

These are the prices of a typical step. Late steps are included by a mean factor, one for steps with decodes only and
one for steps with prompts. `speed_profile.py` records when steps were late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from statistics import median
from typing import Any

from chairlift.core.cost_model import StepShape
from chairlift.errors import InvalidParameter
from chairlift_lab.simulator.speed_profile import SpeedProfile

BENDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

Steps = Sequence[tuple[StepShape, float]]
"""(shape, measured seconds) of each step."""

_NAMES = ("step", "request", "prefill_kv", "decode_kv")
_LATENESS = ("late_decodes", "late_prompts")
_SWEEPS, _CONVERGED = 2000, 1e-7
_ROUNDS = 5  # rounds of reweighted fits, which give outliers less weight
_OUTLIER = 3.0  # a step whose error exceeds this multiple of the typical error gets a proportionally lower weight
_SMALLEST_ERROR = 0.02
_MOST_LATE = 3.0  # cap relative to a typical step; longer steps are treated as accidents


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Prices in seconds; none is negative."""

    step: float
    request: float
    prefill_kv: float
    decode_kv: float
    tokens: tuple[tuple[int, float], ...]  # (first token of a step, price per token from there on)
    late_decodes: float = 1.0  # mean measured / predicted of steps with decodes only
    late_prompts: float = 1.0  # the same for steps with prompts
    pace: SpeedProfile | None = None  # how the speed changed during the profile
    _seconds_of: dict[int, float] = field(default_factory=dict, compare=False, repr=False)  # cached, by tokens

    @classmethod
    def fit(cls, steps: Steps) -> MeasuredCost:
        """Fit by least squares of the relative error, so that short steps count as much as long ones. `steps` are in
        order."""
        if not steps:
            raise InvalidParameter("steps", "a profile needs at least one")
        most = max(shape.tokens for shape, _ in steps)
        bends = [bend for bend in BENDS if bend < most]
        rows = [
            (1.0, shape.requests, shape.prefill_kv, shape.decode_kv, *_spread(shape.tokens, bends))
            for shape, _ in steps
        ]
        prices = _fit(rows, [seconds for _, seconds in steps])
        step, request, prefill_kv, decode_kv, *tokens = prices
        fitted = cls(step, request, prefill_kv, decode_kv, tuple(zip(bends, tokens, strict=True)))
        decodes = [(shape, seconds) for shape, seconds in steps if not shape.prefill_tokens]
        prompts = [(shape, seconds) for shape, seconds in steps if shape.prefill_tokens]
        fitted = replace(fitted, late_decodes=fitted._lateness(decodes), late_prompts=fitted._lateness(prompts))
        return replace(fitted, pace=SpeedProfile.of(fitted._beside(steps)))

    def _lateness(self, steps: Steps) -> float:
        """The total duration of these steps relative to the typical one."""
        usual, took = (sum(column) for column in zip((0.0, 0.0), *self._beside(steps), strict=True))
        return took / usual if usual else 1.0

    def _beside(self, steps: Steps) -> list[tuple[float, float]]:
        """(typical, measured) duration of each step, with accidents capped."""
        usual = [self.predict(shape) for shape, _ in steps]
        return [(one, min(seconds, _MOST_LATE * one)) for one, (_, seconds) in zip(usual, steps, strict=True)]

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> MeasuredCost:
        step, request, prefill_kv, decode_kv = (_price(name, saved.get(name)) for name in _NAMES)
        tokens = tuple((int(bend), _price("tokens", price)) for bend, price in saved["tokens"])
        if not tokens or [bend for bend, _ in tokens] != sorted({bend for bend, _ in tokens}) or tokens[0][0] != 0:
            raise InvalidParameter("tokens", "the prices of tokens must begin with the first, and rise from there")
        late_decodes, late_prompts = (_price(name, saved.get(name, 1.0)) for name in _LATENESS)
        pace = SpeedProfile.from_json(saved["pace"]) if saved.get("pace") else None
        return cls(step, request, prefill_kv, decode_kv, tokens, late_decodes, late_prompts, pace)

    def to_json(self) -> dict[str, Any]:
        numbered = {name: getattr(self, name) for name in (*_NAMES, *_LATENESS)}
        tokens = [list(pair) for pair in self.tokens]
        return numbered | {"tokens": tokens, "pace": None if self.pace is None else self.pace.to_json()}

    def predict(self, shape: StepShape) -> float:
        """Seconds at the mean speed."""
        late = self.late_prompts if shape.prefill_tokens else self.late_decodes
        fixed = self.step + self.request * shape.requests + self.prefill_kv * shape.prefill_kv
        return late * (fixed + self._tokens(shape.tokens)) + late * self.decode_kv * shape.decode_kv

    @property
    def seconds_per_position(self) -> float:
        return self.late_decodes * self.decode_kv

    def _tokens(self, count: int) -> float:
        seconds = self._seconds_of.get(count)
        if seconds is None:
            spread = _spread(count, [bend for bend, _ in self.tokens])
            seconds = self._seconds_of[count] = sum(map(mul, spread, (price for _, price in self.tokens)), 0.0)
        return seconds

    def errors(self, steps: Steps) -> list[float]:
        """|measured - predicted| / predicted."""
        return [abs(seconds / self.predict(shape) - 1) for shape, seconds in steps]


def _spread(tokens: int, bends: Sequence[int]) -> list[float]:
    """The number of a step's tokens between each bend and the next."""
    ends = (*bends[1:], math.inf)
    return [max(0, min(tokens, end) - bend) for bend, end in zip(bends, ends, strict=True)]


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    prices = [0.0] * len(rows[0])
    trust = [1.0] * len(rows)
    for _ in range(_ROUNDS):
        prices = _least_squares(rows, seconds, trust, prices)
        predicted = [sum(map(mul, row, prices)) or second for row, second in zip(rows, seconds, strict=True)]
        errors = [abs(second / one - 1) for second, one in zip(seconds, predicted, strict=True)]
        usual = _OUTLIER * max(median(errors), _SMALLEST_ERROR)
        trust = [min(1.0, usual / error) if error else 1.0 for error in errors]
    return prices


def _least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], trust: Sequence[float], start: Sequence[float]
) -> list[float]:
    """Run coordinate descent on the normal equations, clamping each price at 0."""
    size = len(start)
    scaled = [[value / second for value in row] for row, second in zip(rows, seconds, strict=True)]
    columns = list(zip(*scaled, strict=True))
    weighted = [list(map(mul, column, trust)) for column in columns]
    products = [[sum(map(mul, one, other)) for other in columns] for one in weighted]
    targets = [sum(one) for one in weighted]
    prices = list(start)
    for _ in range(_SWEEPS):
        change = 0.0
        for i in range(size):
            if products[i][i] > 0:
                before = prices[i]
                prices[i] = max(0.0, before + (targets[i] - sum(map(mul, products[i], prices))) / products[i][i])
                change = max(change, abs(prices[i] - before) * math.sqrt(products[i][i]))
        if change < _CONVERGED * math.sqrt(len(rows)):
            break
    return prices


def _price(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= 0):
        raise InvalidParameter(name, f"must be a number of at least 0, got {value!r}")
    return float(value)
