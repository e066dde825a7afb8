"""The interface of a reasoning format, its parser, and the choice of the format for a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

from chairlift.errors import InvalidParameter
from chairlift.registry import Registry
from chairlift.text.assistant_parts import AssistantParser, AssistantPart, ReasoningDelta
from chairlift.text.tools.call_grammar import Marker, pattern
from chairlift.text.tools.reader import first_of


class Phase(StrEnum):
    OPEN = "open"  # the prompt has begun the reasoning
    POSSIBLE = "possible"  # the output may begin with reasoning
    CLOSED = "closed"  # the prompt has ended the reasoning, so all output is content


Message = dict[str, Any]
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off


class ReasoningFormat:
    """The reasoning format of one model family: reasoning between two markers at the start of the output."""

    begins: tuple[str, ...]  # the first one is the usual one
    ends: tuple[str, ...]
    order: ClassVar[int] = 100  # the lowest one that recognises a template is chosen
    repeats: ClassVar[bool] = False  # whether reasoning may begin several times, up to `answer`
    answer: ClassVar[str] = ""

    def __init__(self, template: str) -> None:
        self.template = template

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template belongs to this family."""
        return all(end in template for end in cls.ends)

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that stay in the text even if they are special tokens."""
        return (*self.begins, *self.ends)

    def phase(self, prompt: str) -> Phase:
        """Return where the reasoning stands after a prompt, of which the end is enough."""
        end = prompt.rstrip()
        if end.endswith(self.begins):
            return Phase.OPEN
        return Phase.CLOSED if end.endswith(self.ends) else Phase.POSSIBLE

    def parser(self, phase: Phase, content: AssistantParser) -> AssistantParser:
        """Create a parser for one completion's text; `content` parses what is not reasoning."""
        return MarkedReasoningParser(self.begins, self.ends, phase, content)

    def grammar(self, phase: Phase, marker: Marker, *, preambles: bool = True) -> str:
        """Return Lark rules for the output before the content or calls: `before`, and the rules that it needs.

        With `preambles`, texts to the user may stand there, too, in formats that have them.
        """
        if phase is Phase.CLOSED:
            return ""
        rest = "thought THOUGHT_SPACE?"
        start = f"before: {rest}" if phase is Phase.OPEN else f"before: ({marker(self.begins[0])} {rest})?"
        return "\n".join([start, *reasoning_rules(self.ends[0], marker), r"THOUGHT_SPACE: /[ \t\r\n]{1,8}/"])

    def answer_header(self, marker: Marker) -> str:
        """Return what stands before content in a grammar."""
        return ""

    def history(self, messages: list[Message]) -> list[Message]:
        """Give the reasoning of earlier messages the name that templates read."""
        return [renamed_reasoning(message, "reasoning_content") for message in messages]

    def template_variables(self, effort: str, known: frozenset[str]) -> dict[str, Any]:
        """Return the variables of the chat template, of which there are `known` ones, for a reasoning effort."""
        if "reasoning_effort" in known:
            return {"reasoning_effort": effort}
        switch = next((name for name in SWITCHES if name in known), None)
        if switch is not None:
            return {switch: effort != "none"}
        if effort == "none":
            raise InvalidParameter(
                "reasoning_effort", "this model always reasons: its chat template has no such setting"
            )
        return {}


def reasoning_rules(end: str, marker: Marker) -> list[str]:
    """The rule `thought` for reasoning up to its end marker, and the rules that it needs."""
    spelled = marker(end)
    if spelled.startswith("<["):
        # All other tokens, also halves of characters; `grammar_source.py` excludes those that end the output.
        return [f"thought: thought_token* {spelled}", f"thought_token: {spelled.replace('[', '[^')}"]
    return [f"thought[lazy]: /(?s:.*){pattern(end)}/"]


def renamed_reasoning(message: Message, name: str) -> Message:
    """Return a message whose reasoning, in any of the usual fields, is called `name`."""
    fields = ("reasoning_content", "reasoning")
    given = next((message[field] for field in fields if isinstance(message.get(field), str)), None)
    if given is None:
        return message
    return {key: value for key, value in message.items() if key not in fields} | {name: given}


REASONING_FORMATS: Registry[type[ReasoningFormat]] = Registry(
    "reasoning_parser", "chairlift.text.reasoning_formats", grouped=True
)
NO_REASONING = "none"


def choose_reasoning(template: str, name: str | None = None) -> ReasoningFormat | None:
    """Return the format called `name`, or the one recognised from the chat template; None without reasoning."""
    name = name or recognised_reasoning(template)
    return None if name == NO_REASONING else REASONING_FORMATS.get(name)(template)


def recognised_reasoning(template: str) -> str:
    """Return the name of the format that is recognised from a chat template."""
    names = sorted(REASONING_FORMATS.names(), key=lambda name: REASONING_FORMATS.get(name).order)
    return next((name for name in names if REASONING_FORMATS.get(name).recognises(template)), NO_REASONING)


class MarkedReasoningParser:
    """Parses reasoning at the start of a text and passes the rest to the parser of the content.

    White space around the reasoning is dropped. A text that does not begin with reasoning is content as a whole.
    """

    def __init__(self, begins: Sequence[str], ends: Sequence[str], phase: Phase, content: AssistantParser) -> None:
        self._begins = begins
        self._ends = ends
        self._phase = phase
        self._content = content
        self._held = ""  # text that is not assigned to a part yet
        self._at_start = phase is not Phase.CLOSED  # a begin marker may come next
        self._after_end = False  # white space is dropped until the content begins
        self._trimmed = TrimmedReasoning()

    def push(self, text: str) -> list[AssistantPart]:
        self._held += text
        parts: list[AssistantPart] = []
        if self._at_start:
            self._read_begin()
        if not self._at_start and self._phase is Phase.OPEN:
            parts += self._read_reasoning()
        if self._phase is Phase.CLOSED:
            parts += self._read_content()
        return parts

    def close(self) -> list[AssistantPart]:
        parts: list[AssistantPart] = []
        if self._phase is Phase.OPEN:
            parts += self._trimmed.add(self._held)
        elif self._held and not self._after_end:
            parts += self._content.push(self._held)
        return parts + self._content.close()

    def _read_begin(self) -> None:
        """Remove the begin marker, which may also follow a prompt that contains it; decide on the phase without it."""
        stripped = self._held.lstrip()
        found = next((begin for begin in self._begins if stripped.startswith(begin)), None)
        if found is not None:
            self._phase, self._at_start, self._held = Phase.OPEN, False, stripped[len(found) :]
        elif not any(begin.startswith(stripped) for begin in self._begins):
            self._at_start = False
            if self._phase is Phase.POSSIBLE:
                self._phase = Phase.CLOSED

    def _read_reasoning(self) -> list[AssistantPart]:
        text, end, self._held = first_of(self._ends, self._held)
        if end is not None:
            self._phase, self._after_end = Phase.CLOSED, True
        return self._trimmed.add(text)

    def _read_content(self) -> list[AssistantPart]:
        if self._after_end:
            self._held = self._held.lstrip()
            self._after_end = not self._held
        text, self._held = self._held, ""
        return self._content.push(text)


class TrimmedReasoning:
    """Drops the white space at both ends of a reasoning text that arrives in pieces; `before` separates it from an
    earlier one."""

    def __init__(self, before: str = "") -> None:
        self._spaces = before
        self._begun = False

    def add(self, text: str) -> list[AssistantPart]:
        """Return the part for more text, without white space that may be at an end."""
        if not self._begun:
            text = text.lstrip()
        stripped = text.rstrip()
        if not stripped:
            self._spaces += text  # empty before the first other character
            return []
        part = ReasoningDelta(self._spaces + stripped)
        self._begun, self._spaces = True, text[len(stripped) :]
        return [part]
