"""Output lengths learned from the requests that ended, for each tenant."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable

from chairlift.core.request import Ending, FinishReason, Request

REMEMBERED_LENGTHS = 500  # The count is for each tenant.
REMEMBERED_TENANTS = 1000
LEAST = 8  # lengths of a tenant from which they are believed; before, those of all tenants are


class _Lengths:
    """The last lengths, also in order of size."""

    def __init__(self) -> None:
        self.latest: deque[int] = deque()
        self.sorted: list[int] = []

    def add(self, length: int) -> None:
        self.latest.append(length)
        insort(self.sorted, length)
        if len(self.latest) > REMEMBERED_LENGTHS:
            del self.sorted[bisect_left(self.sorted, self.latest.popleft())]

    def median_above(self, length: int) -> int | None:
        first = bisect_right(self.sorted, length)
        return self.sorted[(first + len(self.sorted)) // 2] if first < len(self.sorted) else None


class OutputLengths:
    """Expects that a request will be as long as the median of those that were longer than it is now."""

    def __init__(self, *, knows_limits: bool = True) -> None:
        """`knows_limits`: nothing is expected beyond `max_new_tokens`. In a simulation that is the true length."""
        self._knows_limits = knows_limits
        self._all = _Lengths()
        self._tenants: OrderedDict[str, _Lengths] = OrderedDict()

    def ended(self, request: Request, ending: Ending) -> None:
        """Learn the length of a request, unless something else ended it."""
        if ending.reason not in (FinishReason.STOP, FinishReason.LENGTH) or request.prompt_only:
            return
        self._tenants.setdefault(request.tenant, _Lengths()).add(request.num_output)
        self._tenants.move_to_end(request.tenant)
        if len(self._tenants) > REMEMBERED_TENANTS:
            self._tenants.popitem(last=False)
        self._all.add(request.num_output)

    def remaining(self, request: Request) -> int | None:
        """The tokens that `request` is expected to generate yet; None without enough data."""
        own = self._tenants.get(request.tenant)
        lengths = own if own is not None and len(own.sorted) >= LEAST else self._all
        if len(lengths.sorted) < LEAST:
            return None
        median = lengths.median_above(request.num_output)
        expected = 1 if median is None else median - request.num_output
        return min(expected, max(1, request.max_new_tokens - request.num_output)) if self._knows_limits else expected

    def most_blocks(self, requests: Iterable[Request], block_size: int) -> int:
        """The most blocks that `requests` will hold together, if each ends when it is expected to; 0 without enough
        data."""
        ends = [(self.remaining(request), request) for request in requests]
        most = tokens = slots = 0
        # From the last to end to the first: those that end later still hold their blocks when one ends.
        for steps, request in sorted(ends, key=lambda entry: entry[0] or 0, reverse=True):
            if steps is None:
                return 0
            tokens, slots = tokens + request.num_known, slots + request.num_slots
            most = max(most, (tokens + steps * slots) // block_size + slots)
        return most
