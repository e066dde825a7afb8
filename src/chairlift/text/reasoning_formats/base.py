"""The interface of a reasoning format, and the choice of the format for a chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from chairlift.errors import InvalidParameter
from chairlift.registry import Registry
from chairlift.text.assistant_parts import AssistantParser
from chairlift.text.reasoning.marked_parser import MarkedReasoningParser
from chairlift.text.reasoning.phase import Phase
from chairlift.text.tools.call_grammar import Marker, pattern

Message = dict[str, Any]
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off


class ReasoningFormat(ABC):
    """The reasoning format of one model family: reasoning between two markers at the start of the output."""

    begins: tuple[str, ...]  # the first one is the usual one
    ends: tuple[str, ...]
    order: ClassVar[int] = 100  # the lowest one that recognises a template is chosen
    repeats: ClassVar[bool] = False  # whether reasoning may begin several times, up to `answer`
    answer: ClassVar[str] = ""

    def __init__(self, template: str) -> None:
        self.template = template

    @staticmethod
    @abstractmethod
    def recognises(template: str) -> bool:
        """Return whether a chat template belongs to this family."""

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
    "reasoning_parser", "chairlift.text.reasoning_formats", separator="_"
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
