"""The deadlines of requests, and which of them can no longer be met."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from chairlift.core.cost_model import WorkForecast
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.request import Request, Status

FORECAST_EVERY = 0.1  # seconds; checking every request in every step costs more than it saves


class Deadlines:
    """A heap of deadlines."""

    def __init__(self, find: Callable[[str], Request | None]) -> None:
        self._find = find
        # The entries are (deadline, order, id); they have ids, so that finished requests can be freed.
        self._heap: list[tuple[float, int, str]] = []
        self._last_forecast = -math.inf

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.order, request.id))

    def next(self) -> float | None:
        while self._heap and self._request(self._heap[0]) is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed."""
        requests = []
        while (deadline := self.next()) is not None and deadline <= now:
            request = self._request(heapq.heappop(self._heap))
            assert request is not None
            requests.append(request)
        return requests

    def unmeetable(self, now: float, forecast: WorkForecast, kv: KVCache) -> list[Request]:
        """Requests that would miss their deadline even in an empty batch.

        Uncertain costs count as zero, such as output tokens after a possible end of the text.
        """
        if now - self._last_forecast < FORECAST_EVERY:
            return []
        self._last_forecast = now
        open_requests = (self._request(entry) for entry in self._heap)
        return [request for request in open_requests if request is not None and _too_late(request, now, forecast, kv)]

    def _request(self, entry: tuple[float, int, str]) -> Request | None:
        request = self._find(entry[2])
        # A request with the same id may have been submitted since.
        return request if request is not None and request.order == entry[1] and request.ending is None else None


def _too_late(request: Request, now: float, forecast: WorkForecast, kv: KVCache) -> bool:
    assert request.deadline is not None
    time_left = request.deadline - now
    if forecast.least_seconds(request.num_behind, request.least_new_tokens) <= time_left:
        return False
    if request.status is not Status.WAITING:
        return True
    cached = len(kv.match(request).blocks) * kv.block_size  # looked up last, because it costs time
    prompt_tokens = min(request.num_behind, request.num_known - cached)
    return forecast.least_seconds(prompt_tokens, request.least_new_tokens) > time_left
