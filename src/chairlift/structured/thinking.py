"""Thinking budgets: the restrictions on the next tokens of requests that limit their reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request
from chairlift.text.reasoning.reasoning_use import ReasoningUse
from chairlift.text.reasoning.tracker import ReasoningTracker, Restriction
from chairlift.text.reasoning_formats.base import ReasoningFormat
from chairlift.text.tokenizer import Tokenizer


class ThinkingBudgets:
    """Creates the state of each request with a thinking budget."""

    def __init__(self, format_: ReasoningFormat | None, tokenizer: Tokenizer) -> None:
        self.format = format_
        self._tokenizer = tokenizer

    def state(self, request: Request) -> ThinkingState | None:
        """The state of a request; None if it has no budget or its prompt has ended the reasoning."""
        budget = request.params.thinking_token_budget
        if budget is None:
            return None
        tracker = ReasoningUse.after(request.prompt, self.format, self._tokenizer).tracker()
        return None if tracker is None else ThinkingState(tracker, budget)


class ThinkingState:
    """A request's position in its reasoning, which depends only on its output."""

    def __init__(self, tracker: ReasoningTracker, budget: int) -> None:
        self._first = tracker
        self._tracker = tracker.copy()
        self._num_tokens = 0
        self._budget = budget

    def restrictions(self, request: Request, drafts: Sequence[int]) -> list[Restriction | None]:
        """Return what the budget demands of the next token and of the token after each draft."""
        self._follow(request)
        found = [self._tracker.restriction(self._budget)]
        ahead = self._tracker.copy() if drafts else self._tracker
        for draft in drafts:
            ahead.push(draft)
            found.append(ahead.restriction(self._budget))
        return found

    def _follow(self, request: Request) -> None:
        if request.num_output < self._num_tokens:  # tokens were removed
            self._tracker, self._num_tokens = self._first.copy(), 0
        for token in request.tokens[request.num_prompt + self._num_tokens :]:
            self._tracker.push(token)
        self._num_tokens = request.num_output
