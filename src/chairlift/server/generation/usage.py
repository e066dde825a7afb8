"""Token counts of one HTTP request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chairlift.server.process.messages import Update
from chairlift.text.reasoning.tracker import ReasoningTracker


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    engine_died: bool = False  # while it worked on the request
    # Creates the tracker of a completion's reasoning; None for endpoints and models without reasoning.
    new_tracker: Callable[[], ReasoningTracker | None] | None = None
    _trackers: dict[str, ReasoningTracker | None] = field(default_factory=dict)  # by completion
    _admitted: set[str] = field(default_factory=set)  # completions whose cached tokens are counted

    def add(self, update: Update) -> None:
        self.completion_tokens += len(update.tokens)
        if self.new_tracker is not None:
            self._count_reasoning(update)
        # A preempted completion is admitted again, and completions of one prompt share its cached tokens: count only
        # the first admission of the first completion.
        if update.cached_tokens is not None and update.request_id not in self._admitted:
            self._admitted.add(update.request_id)
            if "#" not in update.request_id:
                self.cached_tokens += update.cached_tokens

    def counts(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def _count_reasoning(self, update: Update) -> None:
        assert self.new_tracker is not None
        if update.request_id not in self._trackers:
            self._trackers[update.request_id] = self.new_tracker()
        tracker = self._trackers[update.request_id]
        if tracker is None or tracker.over:
            return
        before = tracker.count
        for token in update.tokens:
            tracker.push(token)
        self.reasoning_tokens += tracker.count - before

    def body(self, *, without: int = 0) -> dict[str, Any]:
        """Return OpenAI's object; `without` completion tokens are left out."""
        completion_tokens = self.completion_tokens - without
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
