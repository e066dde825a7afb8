"""One HTTP request's share of the metrics, and its text for the dashboard."""

from __future__ import annotations

import time

from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.metrics import Metrics
from chairlift.server.process.messages import Update


class RequestMetrics:
    """Watches a stream, so that times are those at which the engine's word reached this process: a client that
    reads slowly does not make the engine look slow. They count from the request's arrival."""

    def __init__(self, metrics: Metrics, arrived: float, texts: RequestTexts | None = None) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._texts = texts  # where they are kept, if somebody looks at the dashboard
        self._last: dict[str, float] = {}  # by completion: when its last token came
        self._boarded: set[str] = set()

    def note(self, update: Update) -> None:
        now = time.monotonic()
        if update.text and self._texts is not None:
            self._texts.note(update)
        if update.tokens:
            self._note_tokens(update.request_id, len(update.tokens), now)
        if update.cached_tokens is not None and update.request_id not in self._boarded:
            self._boarded.add(update.request_id)  # a preempted completion boards again
            if "#" not in update.request_id:  # completions of the same prompt share it: count it once
                self._metrics.cached_tokens.inc(update.cached_tokens)
        if update.finish_reason is not None:
            self._metrics.end_to_end.observe(now - self._arrived)
            self._metrics.requests.labels(update.finish_reason).inc()

    def _note_tokens(self, request_id: str, count: int, now: float) -> None:
        before = self._last.get(request_id)
        if before is None:
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token.observe((now - before) / count)
        self._last[request_id] = now
        self._metrics.output_tokens.inc(count)

    def cut_short(self, reason: str, count: int) -> None:
        self._metrics.requests.labels(reason).inc(count)
