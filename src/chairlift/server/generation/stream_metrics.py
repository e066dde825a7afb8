"""Metrics of one HTTP request, from its update stream, and its text for the dashboard."""

from __future__ import annotations

import time

from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.metrics import Metrics
from chairlift.server.process.messages import Update


class StreamMetrics:
    """Records metrics when updates arrive at the front end, so that slow clients do not affect them. Times count from
    the request's arrival."""

    def __init__(self, metrics: Metrics, arrived: float, texts: RequestTexts | None = None) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._texts = texts  # None while no dashboard page is open
        self._last_token: dict[str, float] = {}  # time of the last token, by completion
        self._admitted: set[str] = set()

    def on_update(self, update: Update) -> None:
        now = time.monotonic()
        if update.text and self._texts is not None:
            self._texts.add(update)
        if update.tokens:
            self._count_tokens(update.request_id, len(update.tokens), now)
        if update.cached_tokens is not None and update.request_id not in self._admitted:
            self._admitted.add(update.request_id)  # again after a preemption
            if "#" not in update.request_id:  # completions of one prompt share it, so count only the first
                self._metrics.cached_tokens.inc(update.cached_tokens)
        if update.finish_reason is not None:
            self._metrics.end_to_end.observe(now - self._arrived)
            self._metrics.requests.labels(update.finish_reason).inc()

    def _count_tokens(self, request_id: str, count: int, now: float) -> None:
        last = self._last_token.get(request_id)
        if last is None:
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token.observe((now - last) / count)
        self._last_token[request_id] = now
        self._metrics.output_tokens.inc(count)

    def on_cut_short(self, reason: str, count: int) -> None:
        self._metrics.requests.labels(reason).inc(count)
