"""The interface of a tool-call format, and the choice of the format for a chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from chairlift.registry import Registry
from chairlift.text.tools.call_grammar import Marker
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.tool import Tool

Message = dict[str, Any]
Call = tuple[str, str]  # a function's name, and its arguments as JSON


class ToolFormat(ABC):
    """How the models of one family write tool calls."""

    parser: ClassVar[type[CallParser]]
    markers: ClassVar[tuple[str, ...]] = ()  # may be special tokens, which the text must contain all the same
    order: ClassVar[int] = 100  # of several formats that recognise a template, the lowest is chosen

    def __init__(self, template: str) -> None:
        self.template = template

    @staticmethod
    @abstractmethod
    def recognises(template: str) -> bool:
        """Whether a chat template is one of this family's."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> str:
        """A Lark grammar for one call of one of the tools, or for several if `parallel`."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """The text with which a model of this family makes these calls."""

    def history(self, messages: list[Message]) -> list[Message]:
        """Checked messages in the form that this family's templates require."""
        return messages


TOOL_FORMATS: Registry[type[ToolFormat]] = Registry("tool_format", "chairlift.text.tool_formats", separator="_")
DEFAULT_FORMAT = "hermes"  # the most widespread


def choose_format(template: str, name: str | None = None) -> ToolFormat:
    """The format called `name`, or else the one that the chat template's text shows."""
    if name is None and "tools" not in template:
        name = DEFAULT_FORMAT  # the prompt describes it to the model, see `tools/tool_prompt.py`
    if name is not None:
        return TOOL_FORMATS.get(name)(template)
    formats = sorted(map(TOOL_FORMATS.get, TOOL_FORMATS.names()), key=lambda format_: format_.order)
    return next(format_ for format_ in formats if format_.recognises(template))(template)
