"""The reasoning of one request: where it stands after the prompt, its parser, its grammar and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.text.assistant_parts import AssistantParser
from chairlift.text.reasoning.phase import Phase
from chairlift.text.reasoning.tracker import ReasoningMarks, ReasoningTracker
from chairlift.text.reasoning_formats.base import SWITCHES, ReasoningFormat
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.call_grammar import marker_speller

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

    def visible_special_ids(self) -> list[int]:
        """Return the ids of markers that are special tokens, which the parser needs in the text."""
        markers = self.format.markers if self.format is not None else ()
        ids = [self.tokenizer.added_token_id(marker) for marker in markers]
        return [token for token in ids if token in self.tokenizer.special_ids]

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
