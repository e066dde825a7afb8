"""The budget `slack`: prompts get the time that running requests can spare by their own targets."""

from __future__ import annotations

import math
from bisect import bisect_right

from chairlift.core.budgets.base import BUDGETS, AdaptiveBudget, BatchLoad, StepForecast, knee
from chairlift.core.orderings.slack import due
from chairlift.core.plan import LimitReason, StepLimits

_ENOUGH = 0.98  # A share of the highest throughput: larger steps only make those wait who arrive meanwhile.


@BUDGETS.register("slack")
class SlackBudget(AdaptiveBudget):
    """Chooses the largest step after which no running request is later than its targets allow.

    A request that generated faster than it must has earned time, which one step with a long prompt may spend. One that
    is late gains time again with every step, half of what it could without any prompts. Requests that cannot meet their
    targets even so, and those without, limit nothing.
    """

    uses_targets = True

    def _decide(self, load: BatchLoad) -> StepLimits:
        forecast, known = StepForecast(self._cost, load), self._known_sizes()
        useful = knee(forecast.tokens_per_second, self._sizes, _ENOUGH)
        room = self._planned(self._room(forecast, load)) / self._cost.slowdown
        fits = known[max(1, bisect_right(known, room, key=forecast.seconds)) - 1]
        if useful <= fits:
            return self._chosen(forecast, useful, LimitReason.KNEE)
        return self._chosen(forecast, fits, LimitReason.LEARNING if fits == known[-1] else LimitReason.SLACK)

    def _room(self, forecast: StepForecast, load: BatchLoad) -> float:
        """The longest step with which every running request still meets its targets, if it can."""
        alone, room = forecast.seconds(0), math.inf
        for request in load.decoding:
            left = due(request, alone) - load.now
            pace = request.targets.tpot
            if left > alone:
                room = min(room, left)
            elif pace is not None and pace > alone:
                room = min(room, (alone + pace) / 2)
        return room
