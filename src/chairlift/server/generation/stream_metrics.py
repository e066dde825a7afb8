"""Metrics of one HTTP request, from its update stream, and its text for the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.metrics import Metrics
from chairlift.server.process.messages import Update


@dataclass(slots=True)
class Timeline:
    """When one completion passed its phases, on the monotonic clock. The first admission counts."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0
    finish_reason: str | None = None

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return the start and the end of each phase that has ended."""
        found = {}
        if self.admitted is not None:
            found["queue"] = (self.arrived, max(self.arrived, self.admitted))
            if self.first_token is not None:
                found["prefill"] = (found["queue"][1], self.first_token)
                found["decode"] = (self.first_token, self.last_token)
        return found


class StreamMetrics:
    """Records metrics when updates arrive at the front end, so that slow clients do not affect them. Times count from
    the request's arrival."""

    def __init__(
        self,
        metrics: Metrics,
        arrived: float,
        texts: RequestTexts | None = None,
        *,
        timelines: dict[str, Timeline] | None = None,
        prompt_lengths: Iterable[int] = (),
    ) -> None:
        """`timelines` is filled, by completion; `prompt_lengths` are counted."""
        self._metrics = metrics
        self._arrived = arrived
        self._texts = texts  # None while no dashboard page is open
        self._timelines = {} if timelines is None else timelines
        for count in prompt_lengths:
            metrics.request_prompt_tokens.observe(count)

    def on_update(self, update: Update) -> None:
        now = time.monotonic()
        line = self._timelines.get(update.request_id)
        if line is None:
            line = self._timelines[update.request_id] = Timeline(self._arrived)
        if update.text and self._texts is not None:
            self._texts.add(update)
        if update.cached_tokens is not None and line.admitted is None:  # again after a preemption
            line.admitted = now if update.admitted is None else update.admitted
            if "#" not in update.request_id:  # completions of one prompt share it, so count only the first
                self._metrics.cached_tokens.inc(update.cached_tokens)
        if update.tokens:
            self._count_tokens(line, len(update.tokens), now)
        if update.finish_reason is not None:
            line.finish_reason = update.finish_reason
            self._record_end(line, now)

    def _count_tokens(self, line: Timeline, count: int, now: float) -> None:
        if line.first_token is None:
            line.first_token = now
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token.observe((now - line.last_token) / count)
        line.last_token = now
        line.num_tokens += count
        self._metrics.output_tokens.inc(count)

    def _record_end(self, line: Timeline, now: float) -> None:
        self._metrics.end_to_end.observe(now - self._arrived)
        self._metrics.requests.labels(line.finish_reason).inc()
        self._metrics.request_output_tokens.observe(line.num_tokens)
        for phase, (start, end) in line.phases().items():
            self._metrics.phases[phase].observe(end - start)

    def on_cut_short(self, reason: str, count: int) -> None:
        self._metrics.requests.labels(reason).inc(count)
