"""Token counts of one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chairlift.server.process.messages import Update


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _admitted: set[str] = field(default_factory=set)  # completions whose cached tokens are counted

    def add(self, update: Update) -> None:
        self.completion_tokens += len(update.tokens)
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

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
