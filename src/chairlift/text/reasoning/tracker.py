"""Follows the reasoning in a completion's tokens: counts it, and says what a thinking budget forces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from chairlift.text.reasoning.phase import Phase


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The markers of one model's reasoning, as bytes and as tokens."""

    begins: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    end_tokens: tuple[int, ...]  # forced when the budget is spent
    begin_tokens: tuple[int, ...] = ()
    # Whether reasoning may begin several times and anywhere in the output, up to `answer`.
    repeats: bool = False
    answer: bytes = b""

    @property
    def longest(self) -> int:
        return max(map(len, (*self.begins, *self.ends, self.answer)))


@dataclass(frozen=True, slots=True)
class Restriction:
    """What a thinking budget demands of the next token."""

    forced: int | None = None
    banned: int | None = None


class ReasoningTracker:
    """The position of one completion in its reasoning. It reads bytes, so the tokens of a marker do not matter."""

    def __init__(self, marks: ReasoningMarks, phase: Phase, token_bytes: Callable[[int], bytes]) -> None:
        self._marks = marks
        self._token_bytes = token_bytes
        self._phase = phase
        self.count = 0  # reasoning tokens, without markers
        self._buffer = b""  # the last bytes, in which a marker may begin
        self._position = 0  # bytes of reasoning
        self._starts: deque[int] = deque(maxlen=64)  # positions of the last reasoning tokens
        self._last: deque[int] = deque(maxlen=max(len(marks.end_tokens), len(marks.begin_tokens)))

    @property
    def over(self) -> bool:
        """Whether the rest of the output is content."""
        return self._phase is Phase.CLOSED

    def copy(self) -> ReasoningTracker:
        other = copy(self)
        other._starts = deque(self._starts, maxlen=self._starts.maxlen)
        other._last = deque(self._last, maxlen=self._last.maxlen)
        return other

    def push(self, token: int) -> None:
        if self._phase is Phase.CLOSED:
            return
        data = self._token_bytes(token)
        self._last.append(token)
        if self._phase is Phase.OPEN:
            self._push_reasoning(data)
        else:
            self._push_before(data)

    def _push_before(self, data: bytes) -> None:
        marks = self._marks
        self._buffer += data
        if marks.repeats:
            self._buffer = self._buffer[-marks.longest - len(data) :]
            begun = any(begin in self._buffer for begin in marks.begins)
            if not begun and marks.answer in self._buffer:
                self._phase = Phase.CLOSED
        else:
            text = self._buffer.lstrip()
            begun = any(text.startswith(begin) for begin in marks.begins)
            if not begun and not any(begin.startswith(text) for begin in marks.begins):
                self._phase = Phase.CLOSED
        if begun:
            self._phase = Phase.OPEN
            self._buffer = b""
            self._last.clear()

    def _push_reasoning(self, data: bytes) -> None:
        marks = self._marks
        self.count += 1
        self._starts.append(self._position)
        self._position += len(data)
        self._buffer = (self._buffer + data)[-marks.longest - len(data) :]
        places = [place for end in marks.ends if (place := self._buffer.rfind(end)) >= 0]
        if places:
            marker = self._position - len(self._buffer) + min(places)
            self.count -= sum(start >= marker for start in self._starts)  # the marker's own tokens
            self._phase = Phase.POSSIBLE if marks.repeats else Phase.CLOSED
            self._buffer = b""
            self._starts.clear()

    def restriction(self, budget: int) -> Restriction | None:
        """What the budget demands of the next token."""
        if self.count < budget or self._phase is Phase.CLOSED:
            return None
        marks, last = self._marks, list(self._last)
        if self._phase is Phase.OPEN:
            return Restriction(forced=marks.end_tokens[_matched(last, marks.end_tokens)])
        # Reasoning that may begin again must not: ban the token that tells it from other output.
        at = min(1, len(marks.begin_tokens) - 1)
        if marks.repeats and last[len(last) - at :] == list(marks.begin_tokens[:at]):
            return Restriction(banned=marks.begin_tokens[at])
        return None


def _matched(last: Sequence[int], marker: Sequence[int]) -> int:
    """The number of the marker's tokens that the output already ends with."""
    sizes = range(min(len(last), len(marker) - 1), 0, -1)
    return next((size for size in sizes if list(last[-size:]) == list(marker[:size])), 0)
