"""Predicts the duration of a step, and of several, from the steps measured so far.

    seconds ≈ a + b·tokens + b'·tokens beyond 64 + b''·tokens beyond 256
                + c·KV read by prompt chunks + c'·KV read by decodes + d·requests

No coefficient is negative: more work never takes less time. The two bends allow a flat part, where reading
the weights dominates, and a steep part, where arithmetic dominates. KV has two coefficients because the tokens of a
chunk share what they read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import mul

from chairlift.core.plan import Chunk, StepPlan
from chairlift.errors import InvalidParameter

BENDS = (64, 256)
# With tokens first, coordinate descent from zero attributes the first step to its tokens and not to a constant, so
# larger steps are predicted to take longer before any has been observed.
FEATURES = ("token", *(f"token_beyond_{bend}" for bend in BENDS), "prefill_kv", "decode_kv", "request", "step")

_STRATUM_MEMORY = 0.97  # A window of about 30 steps of the same size class.
_MEMORY = 0.999  # Classes that no longer occur fade over about 1,000 steps.
_SWEEPS = 4
_OUTLIER = 3.0  # a step whose error exceeds this multiple of the typical error gets a proportionally lower weight
_SMALLEST_ERROR = 0.02  # relative errors below this are never outliers
_RECENT, _ONE_IN = 200, 50  # the tail is the 98th percentile of the last 200 steps
_FIRST_TAIL = 1.25  # It counts until _ONE_IN steps are measured.
# The share of the last log error that corrects the speed factor, and the cap on that error.
_SPEED_GAIN, _SPEED_STEP = 0.2, 0.3
_SPEED_MEMORY = 0.97  # the speed factor decays to 1 while the coefficients absorb it; otherwise both could drift
_MAX_SLOWDOWN_LOG = 1.0  # cap on the log error of a single step
_SETTLED = 8  # steps after which errors are attributed to the machine, not to unsettled coefficients


@dataclass(frozen=True, slots=True)
class StepShape:
    """The properties of a step that its duration depends on."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    decode_kv: int = 0  # KV positions that the attention of decodes reads
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
                decode_kv += chunk.start + chunk.count  # the drafts of a request share what they read
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
    """KV positions that the tokens [start, start + count) read: each reads itself and all before it."""
    return count * start + count * (count + 1) // 2


class CostModel:
    """Recursive least squares of the relative error, with forgetting and non-negative coefficients.

    Steps are grouped by size, and each group forgets only when it gets a new member: an hour of decoding does not erase
    what was learned from prompts. Steps far longer than predicted (a garbage collection, another process) get little
    weight unless they become usual.

    A common speed factor follows a machine that slows down or speeds up as a whole within about five steps. A budget
    with a latency target can allow for slow steps that follow each other (`slowdown`) and for the remaining late ones
    (`tail`).
    """

    def __init__(self, coefficients: Mapping[str, float] | None = None) -> None:
        self.num_observed = 0
        self.largest_prefill = 0  # the most prompt tokens of an observed step
        self.largest_decode = 0
        self.error = 0.1  # recent median of |measured - predicted| / predicted
        self._speed_factor = 1.0
        self._slowdown_log = 0.0  # the logarithm of `slowdown`
        # Measured / predicted. Starts as if two earlier steps had been slow.
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
        return {name: self._speed_factor * weight for name, weight in zip(FEATURES, self._weights, strict=True)}

    @property
    def tail(self) -> float:
        """The 98th percentile of measured / (predicted * slowdown) over recent steps with prompts and decodes."""
        slower = 1 + len(self._lateness) // _ONE_IN
        return max(1.0, sorted(self._lateness)[-slower])

    @property
    def slowdown(self) -> float:
        """Measured / predicted over the last few steps, weighted towards the last one; at least 1."""
        return math.exp(self._slowdown_log)

    def predict(self, shape: StepShape) -> float:
        """Predict the seconds of a step; 0 before the first observation."""
        return self._speed_factor * sum(map(mul, self._weights, shape.features()), 0.0)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from the measured duration of a step."""
        if not (math.isfinite(seconds) and seconds > 0):
            return  # the clock did not advance, or jumped
        predicted = self.predict(shape)
        trust = self._note_error(shape, seconds / predicted) if predicted > 0 else 1.0
        self.num_observed += 1
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)
        self.largest_decode = max(self.largest_decode, shape.decode_tokens)
        row = shape.features()
        target = (*row, seconds / self._speed_factor)
        # Relative errors: a short step counts as much as a long one.
        scale = trust * (self._speed_factor / (predicted or seconds)) ** 2
        self._remember(shape, [scale * feature * other for feature in row for other in target])
        self._fit()

    def _note_error(self, shape: StepShape, ratio: float) -> float:
        """Update the typical error and the speed factor; return the weight of this step in the fit."""
        error = abs(ratio - 1)
        trust = min(1.0, _OUTLIER * max(self.error, _SMALLEST_ERROR) / error) if error else 1.0
        # Small multiplicative updates track the median, so an outlier of any size counts once.
        self.error = max(1e-4, self.error * (1.05 if error > self.error else 1 / 1.05))
        if self.num_observed >= _SETTLED:
            if shape.prefill_tokens and shape.decode_tokens:  # the steps that a budget sizes for a target
                self._note_lateness(ratio / self.slowdown)
            self._slowdown_log = max(0.0, (self._slowdown_log + min(math.log(ratio), _MAX_SLOWDOWN_LOG)) / 2)
            correction = _SPEED_GAIN * max(-_SPEED_STEP, min(math.log(ratio), _SPEED_STEP))
            self._speed_factor = (self._speed_factor * math.exp(correction)) ** _SPEED_MEMORY
        return trust

    def _note_lateness(self, ratio: float) -> None:
        """Record the lateness of a step; a burst of late steps counts once."""
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
        terms = zip(self._moments, stratum.moments, before, strict=True)
        self._moments = [_MEMORY * total + now - then for total, now, then in terms]

    def _fit(self) -> None:
        """Run coordinate descent on the normal equations, clamping each coefficient at 0."""
        size, weights = len(FEATURES), self._weights
        rows = [self._moments[start : start + size + 1] for start in range(0, size * (size + 1), size + 1)]
        for _ in range(_SWEEPS):
            for i, row in enumerate(rows):
                if row[i] > 0:
                    gradient = row[size] - sum(map(mul, weights, row))
                    weights[i] = max(0.0, weights[i] + gradient / row[i])


@dataclass(slots=True)
class _Stratum:
    """Moments of the steps of one size class: Σ weight · feature · (features and seconds), row by row."""

    moments: list[float] = field(default_factory=lambda: _no_moments())
    updated: int = 0


def _no_moments() -> list[float]:
    return [0.0] * (len(FEATURES) * (len(FEATURES) + 1))


def _checked(coefficients: Mapping[str, float], name: str) -> float:
    value = coefficients.get(name)
    if value is None or not (math.isfinite(value) and value >= 0):
        raise InvalidParameter("coefficients", f"{name} must be a number of seconds of at least 0, got {value!r}")
    return float(value)


_SAFETY_FACTOR = 0.8  # share of the prediction that counts before a request is dropped, since it may be too high
_MIN_STEPS = 50  # observed before any prediction of it counts


@dataclass(frozen=True, slots=True)
class WorkForecast:
    """Predicts the time of prompts and completions."""

    cost: CostModel
    chunk: int  # tokens of a prompt in one step
    most_per_step: int = 1  # the most new tokens of a request in one step, more than one with drafts

    @property
    def is_settled(self) -> bool:
        """Whether enough steps are measured to believe it."""
        return self.cost.num_observed >= _MIN_STEPS

    def recompute_seconds(self, tokens: int, start: int = 0, beside: StepShape | None = None) -> float:
        """The time that computing `tokens` tokens of one request, from position `start` on, adds to steps that run
        anyway; `beside` is the other work of those steps. This is the cost of preemption by recomputation."""
        base = beside or StepShape()
        whole, rest = divmod(tokens, self.chunk)
        alone = self.cost.predict(base)
        seconds = whole * (self._predict(base, self.chunk) - alone)
        if rest:
            seconds += self._predict(base, rest) - alone
        kv_seconds = self.cost.predict(StepShape(prefill_kv=chunk_kv(start, tokens))) - self.cost.predict(StepShape())
        return seconds + kv_seconds

    def least_seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """A lower bound on the time to compute `prompt_tokens` and generate `new_tokens` in an empty batch; 0 before
        enough steps are measured."""
        if not self.is_settled:
            return 0.0
        nothing = StepShape()
        steps = -(-prompt_tokens // self.chunk)
        seconds = steps * self.cost.predict(nothing) + self.recompute_seconds(prompt_tokens)
        # The last step of the prompt samples the first token.
        decodes = -(-max(0, new_tokens - 1) // self.most_per_step)
        if decodes:
            middle = prompt_tokens + decodes // 2
            seconds += decodes * self.cost.predict(StepShape(decode_tokens=1, decode_kv=middle, requests=1))
        return _SAFETY_FACTOR * seconds

    def _predict(self, base: StepShape, chunk: int) -> float:
        more = base.prefill_tokens + chunk
        return self.cost.predict(replace(base, prefill_tokens=more, requests=base.requests + 1))
