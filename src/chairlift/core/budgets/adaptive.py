"""Budgets that choose the prompt tokens of each step from its predicted time.

Every running request waits for the whole step, so prompt tokens are paid for in inter-token time. `LatencyBudget`
spends what a target leaves; `KneeBudget` stops where a larger step would hardly raise throughput.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from chairlift.core.budgets.base import FixedBudget, LimitReason, Load, StepLimits, TokenBudget
from chairlift.core.cost_model import CostModel, StepShape, chunk_kv
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter

BUDGETS = ("fixed", "knee", "latency")

_LEAST_CHUNK = 4  # prompts always get this much: they must not starve
_ROOM_FOR_PROMPTS = 16  # seats are given out so that prompts still get this much inside the target
_FIRST_CHUNK, _FIRST_SEATS = 32, 4  # while nothing is known; both may double with each step observed
_KNEE = 0.95  # of the highest throughput
_TAIL_ALLOWANCE = 1.02  # of the target may be taken by a step that is late as few are; the few stay within 1.2 or so
_MOST_CAUTION = 0.5  # of the target, at least so much is planned for, however often steps are late
_LOOK_AHEAD = 64  # of the queue, so many are checked against target_ttft_ms


def make_budget(
    name: str | None,
    cost: CostModel,
    *,
    max_batch_tokens: int,
    max_prefill_tokens: int | None = None,
    target_tpot_ms: float | None = None,
    target_ttft_ms: float | None = None,
) -> TokenBudget:
    """The budget of that name; without one, `latency` if there is a target and `fixed` if not."""
    check_budget(name, target_tpot_ms, target_ttft_ms)
    most = FixedBudget(max_batch_tokens, max_prefill_tokens)
    if target_tpot_ms is not None or target_ttft_ms is not None:
        return LatencyBudget(cost, most, _seconds(target_tpot_ms), _seconds(target_ttft_ms))
    return KneeBudget(cost, most) if name == "knee" else most


def check_budget(name: str | None, target_tpot_ms: float | None, target_ttft_ms: float | None) -> None:
    for parameter, target in (("target_tpot_ms", target_tpot_ms), ("target_ttft_ms", target_ttft_ms)):
        number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if target is not None and not (number and math.isfinite(target) and target > 0):
            raise InvalidParameter(parameter, f"must be a number of milliseconds above 0, got {target!r}")
        if target is not None and name not in (None, "latency"):
            raise InvalidParameter("budget", f"{name!r} keeps no target; choose latency, or leave out {parameter}")
    if name is not None and name not in BUDGETS:
        raise InvalidParameter("budget", f"unknown budget {name!r}; choose from {', '.join(BUDGETS)}")
    if name == "latency" and target_tpot_ms is None and target_ttft_ms is None:
        raise InvalidParameter("budget", "latency needs a target: give target_tpot_ms, target_ttft_ms or both")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


class StepForecast:
    """The time of the next step as a function of its prompt tokens, all decodes included."""

    def __init__(self, cost: CostModel, load: Load) -> None:
        self._cost = cost
        self.decodes = len(load.decoding)
        self._decode_kv = sum(request.num_expected for request in load.decoding)
        lanes = load.prefilling
        self._lanes = max(1, len(lanes))
        self._context = sum(request.num_planned for request in lanes) // self._lanes

    def seconds(self, chunk: int) -> float:
        """Of a step with `chunk` prompt tokens, spread over the prompts on board."""
        return self._seconds(chunk, self._lanes * chunk_kv(self._context, chunk // self._lanes))

    def tokens_per_second(self, chunk: int) -> float:
        """Of many such steps. Later tokens of a prompt read more, but that costs the same in chunks of any size."""
        return (self.decodes + chunk) / max(self._seconds(chunk, chunk * self._context), 1e-9)

    def _seconds(self, chunk: int, kv: int) -> float:
        lanes = self._lanes if chunk else 0
        return self._cost.predict(StepShape(self.decodes, chunk, self._decode_kv, kv, self.decodes + lanes))


class _AdaptiveBudget:
    """What both budgets share: sizes to choose from, caution while little is known, no news without work."""

    def __init__(self, cost: CostModel, most: FixedBudget) -> None:
        self._cost = cost
        self._most = most.most
        self._sizes = chunk_sizes(most.most.prefill_tokens)
        self._last = replace(self._most, reason=LimitReason.LEARNING)

    def limits(self, load: Load) -> StepLimits:
        if load.prefilling or load.waiting:  # else no prompt will ask, and the last decision may stand
            self._last = self._decide(load)
        return self._last

    def _decide(self, load: Load) -> StepLimits:
        raise NotImplementedError

    def _known_sizes(self) -> Sequence[int]:
        """The sizes that are not far beyond what was measured."""
        known = max(_FIRST_CHUNK, 2 * self._cost.largest_prefill)
        return self._sizes[: max(1, bisect_right(self._sizes, known))]

    def _chosen(self, forecast: StepForecast, chunk: int, reason: LimitReason) -> StepLimits:
        seconds = forecast.seconds(chunk) or None
        return replace(self._most, prefill_tokens=chunk, reason=reason, predicted_seconds=seconds)


class KneeBudget(_AdaptiveBudget):
    """The smallest step that comes close to the highest throughput: beyond it, those on board wait for nothing."""

    def _decide(self, load: Load) -> StepLimits:
        forecast, known = StepForecast(self._cost, load), self._known_sizes()[-1]
        if not forecast.decodes:
            return self._chosen(forecast, self._most.prefill_tokens, LimitReason.ALONE)
        chunk = knee(forecast, self._sizes)
        if chunk > known:
            return self._chosen(forecast, known, LimitReason.LEARNING)
        return self._chosen(forecast, chunk, LimitReason.KNEE)


class LatencyBudget(_AdaptiveBudget):
    """Keeps steps short enough for a time per output token, prompts fast enough for a time to first token, or both.

    - `target_tpot` alone: the largest chunk that fits beside the decodes.
    - `target_ttft` alone: the smallest chunk with which all prompts in line make it.
    - both: the smallest with which they make it, but no smaller than throughput demands and no larger than fits.
    """

    def __init__(
        self, cost: CostModel, most: FixedBudget, target_tpot: float | None, target_ttft: float | None
    ) -> None:
        super().__init__(cost, most)
        self._tpot = target_tpot
        self._ttft = target_ttft

    def _decide(self, load: Load) -> StepLimits:
        forecast = StepForecast(self._cost, load)
        limits = self._choose(forecast, load)
        if self._tpot is None:
            return replace(limits, target_seconds=None)
        seats = self._seats(forecast, load, self._planned(self._tpot))
        return replace(limits, seats=seats, target_seconds=self._tpot)

    def _choose(self, forecast: StepForecast, load: Load) -> StepLimits:
        if not forecast.decodes:
            return self._chosen(forecast, self._most.prefill_tokens, LimitReason.ALONE)
        fits, why = self._largest_that_fits(forecast)
        if self._ttft is None:
            return self._chosen(forecast, fits, why)
        needed, why_needed = self._smallest_in_time(forecast, load)
        if self._tpot is not None:
            needed = max(needed, knee(forecast, self._sizes))
        return self._chosen(forecast, *min((needed, why_needed), (fits, why), key=lambda choice: choice[0]))

    def _largest_that_fits(self, forecast: StepForecast) -> tuple[int, LimitReason]:
        sizes = self._known_sizes()
        beyond = LimitReason.LEARNING if sizes[-1] < self._sizes[-1] else LimitReason.FIXED
        if self._tpot is None:
            return sizes[-1], beyond
        target = self._planned(self._tpot) / self._cost.drag
        if forecast.seconds(sizes[-1]) <= target:
            return sizes[-1], beyond
        place = bisect_right(sizes, target, key=forecast.seconds)
        if place:
            return sizes[place - 1], LimitReason.TPOT
        alone = forecast.seconds(0)
        return sizes[0], LimitReason.FLOOR if alone > self._tpot else LimitReason.TPOT

    def _planned(self, target: float) -> float:
        """What to plan for: less than all of it where steps are often later than could be foretold."""
        return target * max(_MOST_CAUTION, min(1.0, _TAIL_ALLOWANCE / self._cost.tail))

    def _smallest_in_time(self, forecast: StepForecast, load: Load) -> tuple[int, LimitReason]:
        assert self._ttft is not None
        needed = tokens_per_second_needed((*load.prefilling, *load.waiting[:_LOOK_AHEAD]), load.now, self._ttft)
        sizes = self._known_sizes()
        speeds = [size / max(forecast.seconds(size), 1e-9) for size in sizes]
        for size, speed in zip(sizes, speeds, strict=True):
            if speed >= needed:
                return size, LimitReason.TTFT
        return sizes[speeds.index(max(speeds))], LimitReason.LATE

    def _seats(self, forecast: StepForecast, load: Load, target: float) -> int:
        """How many may be on board so that all of them decoding, beside a little of a prompt, keep the target."""
        everyone = (*load.running, *load.waiting[:1])
        context = sum(request.num_expected for request in everyone) // len(everyone)

        def seconds(seats: int) -> float:
            return self._cost.predict(StepShape(seats, _ROOM_FOR_PROMPTS, seats * context, 0, seats + 1))

        known = max(_FIRST_SEATS, 2 * self._cost.largest_decode)
        modelled = bisect_right(range(1, known + 1), target, key=seconds)
        # Twice the decodes take at most twice as long. This holds even while the coefficients are far from settled,
        # which they would remain if they kept everybody out.
        proportional = int(forecast.decodes * target / max(forecast.seconds(0), 1e-9))
        return max(1, modelled, min(proportional, known))


def knee(forecast: StepForecast, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that comes close to the highest throughput that any of them is predicted to have."""
    # Tokens rise in a line and seconds in a line that only bends upwards: throughput has one peak.
    peak = max((*sizes[::8], sizes[-1]), key=forecast.tokens_per_second)
    rising = sizes[: sizes.index(peak) + 1]
    enough = _KNEE * forecast.tokens_per_second(peak)
    return rising[bisect_left(rising, enough, key=forecast.tokens_per_second)]


def tokens_per_second_needed(line: Sequence[Request], now: float, target_ttft: float) -> float:
    """How fast the prompts of `line`, one after the other, must be computed for every first token to be in time."""
    ahead, needed = 0, 0.0
    for request in line:
        ahead += request.num_behind
        left = request.arrival + target_ttft - now
        if request.num_output == 0:
            needed = max(needed, ahead / left if left > 0 else math.inf)
    return needed


def chunk_sizes(most: int) -> list[int]:
    """What to choose from: every size at first, then sixteen for each doubling, so that decisions do not flicker."""
    sizes = list(range(min(_LEAST_CHUNK, most), min(most, 16)))
    size = 16
    while size < most:
        sizes.append(size)
        size += 1 << max(0, size.bit_length() - 5)
    return [*sizes, most]
