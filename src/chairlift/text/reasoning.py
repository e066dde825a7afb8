"""The reasoning of one request: where it stands after the prompt, its grammar, and its tokens under a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from chairlift.text.assistant_parts import AssistantParser
from chairlift.text.reasoning_formats.base import SWITCHES, Phase, ReasoningFormat
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.call_grammar import marker_speller


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


_PROMPT_END = 32  # tokens of a prompt that show whether it has begun the reasoning


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """A model's reasoning format, which may be absent, and the phase after the prompt of a request."""

    format: ReasoningFormat | None
    tokenizer: Tokenizer
    phase: Phase = Phase.CLOSED

    @classmethod
    def after(cls, prompt: Sequence[int], format_: ReasoningFormat | None, tokenizer: Tokenizer) -> ReasoningUse:
        """Find the phase after a prompt."""
        if format_ is None:
            return cls(None, tokenizer)
        end = tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        return cls(format_, tokenizer, format_.phase(end))

    @property
    def active(self) -> bool:
        """Whether the output may contain reasoning."""
        return self.format is not None and self.phase is not Phase.CLOSED

    def parser(self, content: AssistantParser) -> AssistantParser:
        """Create a parser for one completion's text."""
        return content if self.format is None or not self.active else self.format.parser(self.phase, content)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser reads."""
        return () if self.format is None else self.format.markers

    def grammar(self, *, answer: bool, preambles: bool = True) -> str:
        """Return Lark rules with `before` for the output before a call or, with `answer`, before content.

        With `preambles`, a text to the user may stand before, which would be part of the content.
        """
        if self.format is None:
            return ""
        rules = self.format.grammar(self.phase, marker_speller(self.tokenizer), preambles=preambles)
        header = self.answer_header()
        if not answer or not header:
            return rules
        reasoning = rules.replace("before:", "reasoning_before:", 1)
        return f"before: {'reasoning_before' if rules else ''} {header}\n{reasoning}"

    def answer_header(self) -> str:
        """Return what stands before content in a grammar, after `before`."""
        return self.format.answer_header(marker_speller(self.tokenizer)) if self.format else ""

    def tracker(self) -> ReasoningTracker | None:
        """Create a tracker for one completion's tokens; None if it has no reasoning."""
        if self.format is None or not self.active:
            return None
        return ReasoningTracker(reasoning_marks(self.format, self.tokenizer), self.phase, self.tokenizer.token_bytes)


def reasoning_marks(format_: ReasoningFormat, tokenizer: Tokenizer) -> ReasoningMarks:
    def tokens(marker: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(marker, add_special_tokens=False))

    return ReasoningMarks(
        begins=tuple(begin.encode() for begin in format_.begins),
        ends=tuple(end.encode() for end in format_.ends),
        end_tokens=tokens(format_.ends[0]),
        begin_tokens=tokens(format_.begins[0]),
        repeats=format_.repeats,
        answer=format_.answer.encode(),
    )


def effort_variables(effort: str | None, format_: ReasoningFormat | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables of the chat template that a reasoning effort sets. It has no effect on a model that does not
    reason."""
    if effort is None or format_ is None:
        return {}
    return format_.template_variables(effort, tokenizer.template_reads)


def split_reasoning(
    options: Mapping[str, Any], effort: str | None, format_: ReasoningFormat | None, tokenizer: Tokenizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `options` of a chat template without switches for reasoning that it does not read, and the variables
    for the effort that these or `effort` ask for."""
    unread = [name for name in SWITCHES if name in options and name not in tokenizer.template_reads]
    for name in unread:
        if effort is None and isinstance(options[name], bool):
            effort = "medium" if options[name] else "none"
    kept = {name: value for name, value in options.items() if name not in unread}
    return kept, effort_variables(effort, format_, tokenizer)
