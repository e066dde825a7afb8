"""Orderings by the targets of requests: `edf` (earliest due first) and `slack` (least slack first)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from chairlift.core.cost_model import StepShape
from chairlift.core.orderings.base import ORDERINGS, Ordering, Outlook
from chairlift.core.request import Request, Status

MAX_OVERTAKES = 512  # A request with a minute's time is meant to be passed over by many with half a second.


def due(request: Request, decode_seconds: float = 0.0) -> float:
    """When the next token of a request is due by its targets; infinity if it has none for that token.

    `decode_seconds`: the time of a later token, which a target for the whole answer leaves room for.
    """
    targets, num_output = request.targets, request.num_expected - request.num_prompt
    times = [math.inf]
    if request.first_token_at is None:
        if targets.ttft is not None:
            times.append(request.arrival + targets.ttft)
    elif targets.tpot is not None:
        times.append(request.first_token_at + targets.tpot * num_output)
    if targets.e2e is not None:
        times.append(request.arrival + targets.e2e - max(0, request.max_new_tokens - num_output - 1) * decode_seconds)
    return min(times)


@ORDERINGS.register("edf")
class EarliestDueOrdering(Ordering):
    """Admits the request whose next token is due first; those without targets come last."""

    name = "edf"
    uses_targets = True
    depends_on_output = True
    max_overtakes = MAX_OVERTAKES

    def claim(self, request: Request) -> float:
        return due(request)


@ORDERINGS.register("slack")
class SlackOrdering(Ordering):
    """Admits the request with the least slack: the time until it is due, less the predicted time of its prompt.

    The time that passes is the same for all, so the claim is the latest time to begin. A prompt that has begun keeps
    it; otherwise several would advance in turn and all be late. A request that can no longer meet its targets comes
    after those that can. So where not all can, the longest prompts give way, as few as possible: in the order in which
    they are due, each time that one would be late, the longest so far is left out.
    """

    name = "slack"
    uses_targets = True
    own_budget = "slack"
    depends_on_output = True
    max_overtakes = MAX_OVERTAKES

    def __init__(self) -> None:
        self._work = _Work()
        self._late: set[int] = set()  # the places of requests that can no longer meet their targets
        self._at_hand: Callable[[Request], int] = lambda request: request.num_computed

    def use_cache(self, tokens_at_hand: Callable[[Request], int]) -> None:
        self._at_hand = tokens_at_hand

    def begin_step(self, outlook: Outlook) -> None:
        self._work = _Work.of(outlook)
        self._late = self._hopeless(outlook)

    def claim(self, request: Request) -> float:
        if request.order in self._late:
            return math.inf
        return due(request, self._work.decode) - self._work.token * request.num_known

    def _hopeless(self, outlook: Outlook) -> set[int]:
        """The requests that will miss their targets even if all the others among them are left out."""
        jobs = []
        for request in (*outlook.running, *outlook.waiting):
            if not request.decoding:
                time = due(request, self._work.decode)
                if time < math.inf:
                    jobs.append((time, request.order, request))
        jobs.sort(key=lambda job: job[:2])
        end, late, chosen = outlook.now, set[int](), list[tuple[float, int, Request]]()
        for time, order, request in jobs:
            seconds = self._work.token * request.num_behind
            heappush(chosen, (-seconds, order, request))
            end += seconds
            while end > time and chosen:
                negative, order, longest = heappop(chosen)
                end += negative
                seconds = self._work.token * (longest.num_known - self._at_hand(longest))
                if longest.status is Status.WAITING and seconds < -negative:  # a part of it is cached
                    heappush(chosen, (-seconds, order, longest))
                    end += seconds
                else:
                    late.add(order)
        return late


@dataclass(frozen=True, slots=True)
class _Work:
    """What tokens cost at present, in seconds; 0 before enough steps are measured."""

    token: float = 0.0  # a prompt token, with the decodes of its step
    decode: float = 0.0  # a step with the decodes alone

    @classmethod
    def of(cls, outlook: Outlook) -> _Work:
        if outlook.forecast is None or not outlook.forecast.is_settled:
            return cls()
        decoding = [request for request in outlook.running if request.decoding]
        size, read = len(decoding), sum(request.num_expected for request in decoding)
        alone = StepShape(decode_tokens=size, decode_kv=read, requests=size)
        chunk = outlook.chunk or outlook.forecast.chunk
        full = StepShape(size, chunk, read, 0, size + 1)
        predict = outlook.forecast.cost.predict
        return cls(predict(full) / chunk, predict(alone))
