"""Requests that must end by some time, and those of them that can no longer make it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from chairlift.core.request import Request

FORECAST_EVERY = 0.1  # seconds: looking at everybody in every step would cost more than it saves


class Forecast(Protocol):
    def least_seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """The least time in which so many tokens can be computed and then so many generated, with the lift empty."""
        ...


class Deadlines:
    def __init__(self, find: Callable[[str], Request | None]) -> None:
        self._find = find
        self._heap: list[tuple[float, int, str]] = []  # ids only: finished requests need not live on in here
        self._last_forecast = -math.inf

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.order, request.id))

    def next(self) -> float | None:
        while self._heap and self._request(self._heap[0]) is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def missed(self, now: float, forecast: Forecast | None = None) -> list[Request]:
        """Those whose time is over, and with a forecast those who would not finish in time even if nobody else were
        there. What cannot be known is taken in their favour: that a text may end at its next token, for one."""
        found = []
        while (deadline := self.next()) is not None and deadline <= now:
            request = self._request(heapq.heappop(self._heap))
            assert request is not None
            found.append(request)
        if forecast is not None and now - self._last_forecast >= FORECAST_EVERY:
            self._last_forecast = now
            late = [request for request in self._open() if now + _least_seconds(request, forecast) > _time_of(request)]
            found += late
        return found

    def _open(self) -> Iterator[Request]:
        for entry in self._heap:
            request = self._request(entry)
            if request is not None:
                yield request

    def _request(self, entry: tuple[float, int, str]) -> Request | None:
        request = self._find(entry[2])
        # Else it is over, and the id perhaps used again.
        return request if request is not None and request.order == entry[1] and request.ending is None else None


def _least_seconds(request: Request, forecast: Forecast) -> float:
    return forecast.least_seconds(request.num_behind, request.least_new_tokens)


def _time_of(request: Request) -> float:
    assert request.deadline is not None
    return request.deadline
