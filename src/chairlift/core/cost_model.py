"""The duration of a step, learned from measured steps.

    seconds ≈ a + b·tokens + b'·tokens beyond 64 + b''·tokens beyond 256
                + c·KV read by prompt chunks + c'·KV read by decodes + d·requests

No coefficient is negative: more work never takes less time. The two bends let the line be flat where a device reads
all weights even for few tokens, and steep where arithmetic is the limit. KV has two prices because a chunk's tokens
share what they read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import mul

from chairlift.core.plan import Chunk, StepPlan
from chairlift.errors import InvalidParameter

BENDS = (64, 256)
# In this order a coordinate descent from zero explains a first step by its tokens and not by a constant, so that
# larger steps are expected to take longer before any has been seen.
FEATURES = ("token", *(f"token_beyond_{bend}" for bend in BENDS), "prefill_kv", "decode_kv", "request", "step")

_STRATUM_MEMORY = 0.97  # per step of the same kind: about the last 30 count
_MEMORY = 0.999  # per step of any kind: kinds that no longer occur fade over about 1,000 steps
_SWEEPS = 4
_OUTLIER = 3.0  # a step that is off by more typical errors than this counts less, in proportion
_SMALLEST_ERROR = 0.02  # errors below this are never outliers
_RECENT, _ONE_IN = 200, 50  # the tail: among the last 200 steps, one in 50 may be slower
_FIRST_TAIL = 1.25  # before _ONE_IN steps were measured
_PACE_GAIN, _PACE_STEP = 0.2, 0.3  # share of the last step's error that corrects the pace; the error is capped
_PACE_MEMORY = 0.97  # a lasting pace returns to 1 while coefficients take it over: else both could drift apart
_LARGEST_DRAG = 1.0  # cap on the logarithm of a single step
_SETTLED = 8  # steps after which an error is due to the machine rather than the coefficients


@dataclass(frozen=True, slots=True)
class StepShape:
    """The properties of a step that its duration depends on."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    decode_kv: int = 0  # positions that the attention of decodes reads
    prefill_kv: int = 0  # the same for prompt chunks, summed over their tokens
    requests: int = 0
    idle_rows: int = 0  # padding rows, computed like decodes

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        return cls.of_chunks(plan.chunks, plan.idle_rows)

    @classmethod
    def of_chunks(cls, chunks: Collection[Chunk], idle_rows: int = 0) -> StepShape:
        decodes = decode_kv = prefill = prefill_kv = 0
        for chunk in chunks:
            if chunk.decodes:
                decodes += chunk.count
                decode_kv += chunk.start + chunk.count  # drafts are verified together and share what they read
            else:
                prefill += chunk.count
                prefill_kv += chunk_kv(chunk.start, chunk.count)
        return cls(decodes, prefill, decode_kv, prefill_kv, len(chunks), idle_rows)

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens + self.idle_rows

    def features(self) -> tuple[float, ...]:
        tokens = self.decode_tokens + self.prefill_tokens + self.idle_rows
        beyond = [max(0, tokens - bend) for bend in BENDS]
        return (tokens, *beyond, self.prefill_kv, self.decode_kv, self.requests, 1)


def chunk_kv(start: int, count: int) -> int:
    """Positions that the tokens [start, start + count) read: each reads all before it, and itself."""
    return count * start + count * (count + 1) // 2


class CostModel:
    """Recursive least squares with forgetting, in relative error, without negative coefficients.

    Steps are grouped by size, and each stratum forgets only when it gets a new member: an hour of decoding does not
    erase what is known about prompts. Steps that took far longer than expected (a garbage collection, a busy neighbour)
    get little weight, unless they become usual.

    A machine that slows down or speeds up as a whole is followed within some five steps by a common factor, the pace.
    A budget that must not be late can expect that a slow step is followed by another (`drag`) and plan for the steps
    that are late nevertheless (`tail`).
    """

    def __init__(self, coefficients: Mapping[str, float] | None = None) -> None:
        self.num_observed = 0
        self.largest_prefill = 0  # most prompt tokens of any observed step
        self.largest_decode = 0
        self.error = 0.1  # recent median of |measured - predicted| / predicted
        self._pace = 1.0
        self._drag = 0.0  # the logarithm of `drag`
        # Measured / predicted; starts as if two earlier steps had been slow.
        self._lateness = deque([1.0] * (_ONE_IN - 2) + [1.0 if coefficients else _FIRST_TAIL] * 2, maxlen=_RECENT)
        self._was_late = False
        self._weights = [0.0] * len(FEATURES)
        self._strata: dict[tuple[int, int], _Stratum] = {}
        self._moments = _no_moments()  # the sum over all strata
        if coefficients is not None:
            self._weights = [_checked(coefficients, name) for name in FEATURES]

    @property
    def coefficients(self) -> dict[str, float]:
        """Seconds per unit of each feature; `CostModel(coefficients)` predicts the same."""
        return {name: self._pace * weight for name, weight in zip(FEATURES, self._weights, strict=True)}

    @property
    def tail(self) -> float:
        """The factor by which only the slowest fiftieth of the steps with prompts and decodes exceeds prediction times
        drag."""
        slower = 1 + len(self._lateness) // _ONE_IN
        return max(1.0, sorted(self._lateness)[-slower])

    @property
    def drag(self) -> float:
        """How much slower than predicted the last few steps were, weighted towards the last; at least 1."""
        return math.exp(self._drag)

    def predict(self, shape: StepShape) -> float:
        """Seconds; 0 before the first observation."""
        return self._pace * sum(map(mul, self._weights, shape.features()), 0.0)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from the measured duration of a step."""
        if not (math.isfinite(seconds) and seconds > 0):
            return  # the clock stood still or jumped
        predicted = self.predict(shape)
        trust = self._note_error(shape, seconds / predicted) if predicted > 0 else 1.0
        self.num_observed += 1
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)
        self.largest_decode = max(self.largest_decode, shape.decode_tokens)
        row = shape.features()
        target = (*row, seconds / self._pace)
        # Relative errors: a short step counts as much as a long one.
        scale = trust * (self._pace / (predicted or seconds)) ** 2
        self._remember(shape, [scale * one * other for one in row for other in target])
        self._fit()

    def _note_error(self, shape: StepShape, ratio: float) -> float:
        """Update the typical error and the pace; return the weight of this step."""
        error = abs(ratio - 1)
        trust = min(1.0, _OUTLIER * max(self.error, _SMALLEST_ERROR) / error) if error else 1.0
        # The median is followed by small multiplicative steps, so that one outlier counts once whatever its size.
        self.error = max(1e-4, self.error * (1.05 if error > self.error else 1 / 1.05))
        if self.num_observed >= _SETTLED:
            if shape.prefill_tokens and shape.decode_tokens:  # the kind of step that a budget sizes for a target
                self._note_lateness(ratio / self.drag)
            self._drag = max(0.0, (self._drag + min(math.log(ratio), _LARGEST_DRAG)) / 2)
            way = _PACE_GAIN * max(-_PACE_STEP, min(math.log(ratio), _PACE_STEP))
            self._pace = (self._pace * math.exp(way)) ** _PACE_MEMORY
        return trust

    def _note_lateness(self, ratio: float) -> None:
        """Note how late a step was; a burst too slow for drag to follow counts once, however long it lasts."""
        late = ratio > self.tail
        if not (late and self._was_late):
            self._lateness.append(ratio)
        self._was_late = late

    def _remember(self, shape: StepShape, moments: list[float]) -> None:
        key = shape.prefill_tokens.bit_length(), shape.decode_tokens.bit_length()
        stratum = self._strata.setdefault(key, _Stratum())
        fading = _MEMORY ** (self.num_observed - stratum.updated)
        before = [fading * value for value in stratum.moments]
        stratum.moments = [_STRATUM_MEMORY * old + new for old, new in zip(before, moments, strict=True)]
        stratum.updated = self.num_observed
        changes = zip(self._moments, stratum.moments, before, strict=True)
        self._moments = [_MEMORY * total + now - then for total, now, then in changes]

    def _fit(self) -> None:
        """Coordinate descent on the normal equations: each coefficient in turn takes its best value, or 0."""
        size, weights = len(FEATURES), self._weights
        rows = [self._moments[start : start + size + 1] for start in range(0, size * (size + 1), size + 1)]
        for _ in range(_SWEEPS):
            for i, row in enumerate(rows):
                if row[i] > 0:
                    gradient = row[size] - sum(map(mul, weights, row))
                    weights[i] = max(0.0, weights[i] + gradient / row[i])


@dataclass(slots=True)
class _Stratum:
    """Moments of the steps of one size: Σ weight · feature · (features and seconds), row by row."""

    moments: list[float] = field(default_factory=lambda: _no_moments())
    updated: int = 0


def _no_moments() -> list[float]:
    return [0.0] * (len(FEATURES) * (len(FEATURES) + 1))


def _checked(coefficients: Mapping[str, float], name: str) -> float:
    value = coefficients.get(name)
    if value is None or not (math.isfinite(value) and value >= 0):
        raise InvalidParameter("coefficients", f"{name} must be a number of seconds of at least 0, got {value!r}")
    return float(value)
