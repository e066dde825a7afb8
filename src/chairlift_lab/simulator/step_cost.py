"""The duration of a step: by a roofline of a model and a device, or fitted to measured steps."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

from chairlift.core.cost_model import StepShape
from chairlift.errors import InvalidParameter
from chairlift.options import read_text


class StepCost(ABC):
    """The cost model of a simulation."""

    @abstractmethod
    def predict(self, shape: StepShape) -> float:
        """Predict the seconds of a step."""

    def decode_steps(self, size: int, idle: int, context: int, count: int) -> list[float]:
        """Predict `count` steps of `size` decodes and `idle` empty rows, of which the first reads `context` positions;
        none is shorter than the one before."""
        reads = range(context, context + count * size, size)
        return [self.predict(StepShape(size, 0, read, 0, size, idle)) for read in reads]


class LinearCost(StepCost):
    """A cost model in which each position that a decode reads costs the same. `predict` adds this term last, so that
    sums are equal to the last bit."""

    @property
    @abstractmethod
    def seconds_per_position(self) -> float:
        """The time per KV position in a step with decodes only."""

    def decode_steps(self, size: int, idle: int, context: int, count: int) -> list[float]:
        base, per_position = self.predict(StepShape(size, 0, 0, 0, size, idle)), self.seconds_per_position
        return [base + per_position * read for read in range(context, context + count * size, size)]


# ---- the roofline -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """Sustained bandwidth and throughput, which are below the figures of the datasheet."""

    name: str
    bytes_per_second: float
    flops_per_second: float  # dense, in the type the weights are computed in
    memory_bytes: float
    step_seconds: float  # fixed time of a step: kernel launches and waits
    host_bytes_per_second: float = 25e9  # Swapping copies so fast to host memory or back.

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops_per_second", "memory_bytes", "host_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(name, f"must be above 0, got {getattr(self, name)}")
        if not self.step_seconds >= 0:
            raise InvalidParameter("step_seconds", f"must be at least 0, got {self.step_seconds}")


# h200: measured with `chairlift bench shapes`. cpu: two cores with AVX-512, measured. The others: their datasheets'
# bandwidth and bf16 rate, times the share that the h200 reaches of its own (0.90 and 0.80). To the host: about 80% of
# the PCIe bandwidth; on a CPU, a copy within memory.
DEVICES = {
    device.name: device
    for device in (
        Device("h200", 4.3e12, 788e12, 141e9, 0.7e-3, 50e9),
        Device("h100", 3.35e12 * 0.9, 989e12 * 0.8, 80e9, 0.7e-3, 50e9),
        Device("a100", 2.04e12 * 0.9, 312e12 * 0.8, 80e9, 0.9e-3),
        Device("l4", 0.3e12 * 0.9, 121e12 * 0.8, 24e9, 1.0e-3),
        Device("cpu", 14e9, 0.25e12, 16e9, 2e-3, 5e9),
    )
}


def device_named(name: str, **changes: float | None) -> Device:
    """Look up a device and replace the given figures; `custom` needs all of them."""
    figures = {key: value for key, value in changes.items() if value is not None}
    if name == "custom":
        missing = [key for key in ("bytes_per_second", "flops_per_second", "memory_bytes") if key not in figures]
        if missing:
            raise InvalidParameter("device", f"a custom device needs {', '.join(missing)}")
        return Device("custom", **({"step_seconds": 0.0} | figures))
    if name not in DEVICES:
        raise InvalidParameter("device", f"unknown device {name!r}; choose from {', '.join(DEVICES)}, custom")
    return replace(DEVICES[name], **figures)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine its cost."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    kv_bytes_per_token: int  # the sum over all layers
    attention_flops_per_kv: int  # the sum over all layers, per token and KV position
    bytes_per_weight: float
    tied_head: bool = True
    state_bytes: int = 0  # the states of one sequence, in all recurrent layers

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_weight

    @property
    def read_bytes(self) -> float:
        """Bytes of weights read in one step: all but an untied embedding table."""
        looked_up = 0 if self.tied_head else self.vocab_size * self.hidden_size
        return (self.num_parameters - looked_up) * self.bytes_per_weight

    @property
    def layer_parameters(self) -> int:
        """Parameters that every token is multiplied with; the head only gets tokens that are sampled."""
        tables = 1 if self.tied_head else 2
        return self.num_parameters - tables * self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class Roofline(LinearCost):
    """Step time: the slower of reading and multiplying the weights, plus reading the KV cache."""

    model: ModelShape
    device: Device

    @property
    def seconds_per_position(self) -> float:
        return self.model.kv_bytes_per_token / self.device.bytes_per_second

    def predict(self, shape: StepShape) -> float:
        model, device = self.model, self.device
        sampled = shape.decode_tokens + shape.idle_rows
        flops = 2 * (model.layer_parameters * shape.tokens + model.vocab_size * model.hidden_size * sampled)
        products = max(model.read_bytes / device.bytes_per_second, flops / device.flops_per_second)
        prompts = shape.prefill_kv * model.attention_flops_per_kv / device.flops_per_second
        return device.step_seconds + products + prompts + self.seconds_per_position * shape.decode_kv


# ---- measured steps ---------------------------------------------------------------------------------------------

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
_DIGITS = 6  # digits of seconds in a speed profile: microseconds


@dataclass(frozen=True, slots=True)
class MeasuredCost(LinearCost):
    """Prices in seconds; none is negative.

        seconds ≈ step + Σ price of each token by its place in the step + a·requests + b·KV of prompts + c·KV of decodes

    The price per token is piecewise constant between powers of two, because the cost of small matrix products varies
    between machines. The engine's `CostModel` has fewer bends, since it learns online; a profile has all steps at once.

    These are the prices of a typical step. Late steps are included by a mean factor, one for steps with decodes only
    and one for steps with prompts. A `SpeedProfile` records when steps were late.
    """

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
        step, request, prefill_kv, decode_kv, *tokens = _fit(rows, [seconds for _, seconds in steps])
        typical = cls(step, request, prefill_kv, decode_kv, tuple(zip(bends, tokens, strict=True)))
        decodes = [(shape, seconds) for shape, seconds in steps if not shape.prefill_tokens]
        prompts = [(shape, seconds) for shape, seconds in steps if shape.prefill_tokens]
        fitted = replace(typical, late_decodes=typical._lateness(decodes), late_prompts=typical._lateness(prompts))
        return replace(fitted, pace=SpeedProfile.of(fitted._pairs(steps)))

    def _lateness(self, steps: Steps) -> float:
        """The total duration of these steps relative to the typical one."""
        typical, measured = (sum(column) for column in zip((0.0, 0.0), *self._pairs(steps), strict=True))
        return measured / typical if typical else 1.0

    def _pairs(self, steps: Steps) -> list[tuple[float, float]]:
        """(predicted, measured) duration of each step, with accidents capped."""
        pairs = ((self.predict(shape), seconds) for shape, seconds in steps)
        return [(predicted, min(seconds, _MOST_LATE * predicted)) for predicted, seconds in pairs]

    @classmethod
    def load(cls, path: Path) -> MeasuredCost:
        """Load the prices of `chairlift bench profile`."""
        try:
            return cls.from_json(json.loads(read_text(path, "profile"))["prices"])
        except (OSError, ValueError, KeyError, TypeError, InvalidParameter) as error:
            raise InvalidParameter("profile", f"cannot read {str(path)!r} ({error})") from None

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
        prices = {name: getattr(self, name) for name in (*_NAMES, *_LATENESS)}
        tokens = [list(pair) for pair in self.tokens]
        return prices | {"tokens": tokens, "pace": None if self.pace is None else self.pace.to_json()}

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
        predictions = [sum(map(mul, row, prices)) or second for row, second in zip(rows, seconds, strict=True)]
        errors = [abs(second / prediction - 1) for second, prediction in zip(seconds, predictions, strict=True)]
        limit = _OUTLIER * max(median(errors), _SMALLEST_ERROR)
        trust = [min(1.0, limit / error) if error else 1.0 for error in errors]
    return prices


def _least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], trust: Sequence[float], start: Sequence[float]
) -> list[float]:
    """Run coordinate descent on the normal equations, clamping each price at 0."""
    size = len(start)
    scaled = [[value / second for value in row] for row, second in zip(rows, seconds, strict=True)]
    columns = list(zip(*scaled, strict=True))
    weighted = [list(map(mul, column, trust)) for column in columns]
    products = [[sum(map(mul, left, right)) for right in columns] for left in weighted]
    targets = [sum(column) for column in weighted]
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


# ---- speed over time --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeedProfile:
    """The speed of a machine over time: a line through (work done, time passed), which repeats after its end.

    The duration of the same step varies with other programs, clock speeds and interrupts. Slow periods last for many
    steps, and requests queue up in them, so latency percentiles depend on them and not only on the mean. Therefore a
    profile records the predicted and the measured duration of its steps in order. A simulated engine moves along that
    line: an amount of work takes as long as it took at the same point of the profile.
    """

    pieces: tuple[tuple[float, float], ...]  # (seconds of work by the prices, seconds it took)
    _work: list[float] = field(init=False, compare=False, repr=False)  # done before each piece, and in all
    _time: list[float] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.pieces or not all(work > 0 and duration > 0 for work, duration in self.pieces):
            raise InvalidParameter("pace", "must be pairs of numbers above 0, and at least one")
        object.__setattr__(self, "_work", list(accumulate((work for work, _ in self.pieces), initial=0.0)))
        object.__setattr__(self, "_time", list(accumulate((duration for _, duration in self.pieces), initial=0.0)))

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> SpeedProfile | None:
        """Build a profile, rounded as it is saved; None without any usable pair."""
        rounded = ((round(work, _DIGITS), round(duration, _DIGITS)) for work, duration in pairs)
        pieces = tuple((work, duration) for work, duration in rounded if work > 0 and duration > 0)
        return cls(pieces) if pieces else None

    @classmethod
    def from_json(cls, saved: Sequence[Sequence[int]]) -> SpeedProfile:
        return cls(tuple((round(work * 1e-6, _DIGITS), round(duration * 1e-6, _DIGITS)) for work, duration in saved))

    def to_json(self) -> list[Any]:
        """Whole microseconds, to keep files small."""
        return [[round(1e6 * work), round(1e6 * duration)] for work, duration in self.pieces]

    @property
    def total_work(self) -> float:
        return self._work[-1]

    def time_at(self, work: float) -> float:
        """The time at which `work` is done."""
        laps, rest = divmod(work, self._work[-1])
        index = bisect_right(self._work, rest, hi=len(self.pieces)) - 1
        amount, duration = self.pieces[index]
        return laps * self._time[-1] + self._time[index] + (rest - self._work[index]) / amount * duration


class SpeedCursor:
    """A position on a speed profile."""

    def __init__(self, profile: SpeedProfile, begin: float = 0.0) -> None:
        """`begin`: the share of the profile to skip."""
        self._profile = profile
        self._done = begin * profile.total_work
        self._time = profile.time_at(self._done)
        self._ahead: list[tuple[float, float]] = []  # (work done, time), now and after each step looked ahead

    def advance(self, work: float) -> float:
        """Do an amount of work; return its duration."""
        before = self._time
        self._done += work
        self._time = self._profile.time_at(self._done)
        return self._time - before

    def look_ahead(self, work: Iterable[float]) -> list[float]:
        """The duration of each of these amounts of work, one after the other."""
        self._ahead = [(done, self._profile.time_at(done)) for done in accumulate(work, initial=self._done)]
        return [later - earlier for (_, earlier), (_, later) in pairwise(self._ahead)]

    def advance_steps(self, steps: int) -> None:
        """Do the first `steps` amounts of the last `look_ahead`."""
        self._done, self._time = self._ahead[steps]
