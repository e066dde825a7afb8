"""The waiting requests: their order, the limit on passing them over, and why each waits."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import overload

from chairlift.core.orderings.base import MAX_OVERTAKES, Ordering
from chairlift.core.request import Request


class WaitReason(StrEnum):
    """Why a request waits."""

    NEXT_STEP = "it has not been considered yet"
    SLOTS = "all slots are taken (max_batch_requests)"
    LATE = "it can no longer meet its targets, so those that can come first (order slack)"
    TARGET = "with one more running, the others' tokens would come later than target_tpot_ms"
    BUDGET = "the step's token budget is used up (max_batch_tokens, max_prefill_tokens)"
    MEMORY = "not enough free KV blocks for its tokens"
    FUTURE = "memory would run out before the running ones end, if they get as long as others did (learn_lengths)"
    PREEMPTION = "memory ran out in this step; no request is admitted until the running ones fit"
    ISOLATION = "its tenant has many requests, and steps are kept short for tenants with few (order fair)"
    TURN = "a request that was passed over too often is next, and does not fit yet"
    BATCH_FILLING = "the policy waits for more requests to fill a batch (max_delay_ms)"
    BATCH_RUNNING = "the policy admits no request while a batch is running"
    SIBLING = "its sibling (n > 1) is still computing the prompt they share"
    GRAMMAR = "the grammar of its structured output is being compiled"
    PREFIX = "a running request is computing the prefix they share"
    ADAPTER = "its adapter is being loaded"
    ADAPTER_MEMORY = "its adapter has no room until running requests with others end (max_loras, lora_memory)"
    IMAGES = "its next image is being encoded"
    LOADING = "blocks of its prefix are being loaded from host memory or disk"

    @property
    def label(self) -> str:
        """Its label in metrics and on the dashboard."""
        return self.name.lower()


_SHORTAGES = (WaitReason.SLOTS, WaitReason.TARGET, WaitReason.BUDGET, WaitReason.MEMORY)


class WaitingQueue(Sequence[Request]):
    """The queue. It iterates in order of submission; requests are admitted in the order of `ordering`.

    A request may be passed over by one with a better claim, or by a smaller one when memory or budget is short. Each
    admission of another request counts for the oldest request and for every request passed over in that step. After
    `max_overtakes` of them a request is *starved*: it comes before all that are not, and no other is admitted until it
    fits.
    """

    def __init__(self, ordering: Ordering, max_overtakes: int = MAX_OVERTAKES) -> None:
        self.ordering = ordering
        self.max_overtakes = max_overtakes
        self._requests: list[Request] = []
        self._starved: list[Request] = []
        self._reasons: dict[str, WaitReason] = {}
        self._default_reason = WaitReason.NEXT_STEP
        self._num_seen = 0  # requests submitted so far
        self._num_tried = 0  # `_num_seen` at the last admission
        self._num_complete = 0  # requests with a lower `order` do not wait for a full batch

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def oldest(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)
        self._num_seen = max(self._num_seen, request.order + 1)
        if request.starved:
            insort(self._starved, request, key=_order)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self._reasons.pop(request.id, None)
        if request.starved:
            self._starved.remove(request)

    def expect_no_more(self) -> None:
        self._num_complete = self._num_seen

    @property
    def may_grow(self) -> bool:
        """Whether more requests may arrive to fill a batch with the waiting ones."""
        return self.oldest.order >= self._num_complete

    @property
    def num_starved(self) -> int:
        return len(self._starved)

    def in_admission_order(self) -> Iterator[Request]:
        """Yield the requests that are ready; they may be removed from the queue during the iteration."""
        yield from [request for request in self._starved if request.ready]
        if self.ordering.has_claims:
            rest = [request for request in self._requests if request.ready and not request.starved]
            yield from self.ordering.arrange(rest)
        else:
            yield from self._by_submission()

    def _by_submission(self) -> Iterator[Request]:
        """Yield the requests that are ready and not starved, lazily, since the queue may be long."""
        position = 0
        while position < len(self._requests):
            request = self._requests[position]
            if request.ready and not request.starved:
                yield request
            if position < len(self._requests) and self._requests[position] is request:  # otherwise it was removed
                position += 1

    def best_claim(self) -> tuple[bool, float] | None:
        """The claim of the next request, as in `Ordering.rank`; None if there is none."""
        if not self.ordering.has_claims and not self._starved:
            return (True, 0.0) if self._requests else None
        first = next(self.in_admission_order(), None)
        return None if first is None else self.ordering.rank(first)[:2]

    def count_passing(self, admitted: Request, passed_over: list[Request]) -> bool:
        """Count the admission of `admitted` for `passed_over` and the oldest request; return True if one became
        starved."""
        passed = {request.id: request for request in passed_over}
        if self._requests and self.oldest.order < admitted.order:
            passed[self.oldest.id] = self.oldest
        newly_starved = False
        for request in passed.values():
            request.times_passed_over += 1
            if request.times_passed_over >= self.max_overtakes and not request.starved:
                request.starved = newly_starved = True
                insort(self._starved, request, key=_order)
        return newly_starved

    # ---- why each request waits ---------------------------------------------------------------------------------

    def begin_admission(self) -> None:
        self._num_tried = self._num_seen
        self._reasons.clear()
        self._default_reason = WaitReason.NEXT_STEP

    def note(self, request: Request, reason: WaitReason) -> None:
        self._reasons[request.id] = reason

    def note_default(self, reason: WaitReason) -> None:
        """Set the reason of all requests without one of their own."""
        self._default_reason = reason

    def reason(self, request: Request) -> WaitReason:
        found = self.last_reason(request)
        # That reason may no longer hold.
        return WaitReason.NEXT_STEP if found in (WaitReason.SIBLING, WaitReason.PREFIX, WaitReason.LOADING) else found

    def reasons(self) -> Counter[WaitReason]:
        """Count the waiting requests by reason, as of the last admission. Requests with the default reason are not
        iterated over, since the queue may be long and this runs in every step."""
        if self.ordering.uses_targets:
            return Counter(map(self.last_reason, self._requests))
        tried = bisect_left(self._requests, self._num_tried, key=_order)
        others = [request for request in self._requests[:tried] if not request.ready] + self._requests[tried:]
        counts = Counter([*self._reasons.values(), *map(self.last_reason, others)])
        counts[self._default_reason] += len(self._requests) - counts.total()
        return +counts  # drops zero counts

    def last_reason(self, request: Request) -> WaitReason:
        """Why `request` was not admitted in the last step."""
        if not request.ready:
            return WaitReason.GRAMMAR
        if request.order >= self._num_tried:
            return WaitReason.NEXT_STEP
        reason = self._reasons.get(request.id, self._default_reason)
        if reason not in _SHORTAGES or not self.ordering.uses_targets or request.starved:
            return reason
        # What can be in time has a finite claim.
        is_late = request.targets.given and self.ordering.claim(request) == math.inf
        return WaitReason.LATE if is_late else reason


def _order(request: Request) -> int:
    return request.order
