"""The interface of a tool-call format, and the choice of the format for a chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from chairlift.registry import Registry
from chairlift.text.tools.call_grammar import CallGrammar, Marker
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.tool import Tool

Message = dict[str, Any]
Call = tuple[str, str]  # (function name, arguments as JSON)


class ToolFormat(ABC):
    """The tool-call format of one model family."""

    parser: ClassVar[type[CallParser]]
    markers: ClassVar[tuple[str, ...]] = ()  # kept in the text even if they are special tokens
    order: ClassVar[int] = 100  # the lowest one that recognises a template is chosen
    fallback: ClassVar[bool] = False  # whether it recognises templates that it does not know

    def __init__(self, template: str) -> None:
        self.template = template

    @staticmethod
    @abstractmethod
    def recognises(template: str) -> bool:
        """Return whether a chat template belongs to this family."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        """Return a grammar for one call of one of the tools, or for several if `parallel`."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Return these calls as a model of this family writes them."""

    def shown(self, tool: Tool) -> dict[str, Any]:
        """Return a tool in the form that this family's templates require."""
        return tool.given

    def history(self, messages: list[Message]) -> list[Message]:
        """Convert validated messages to the form that this family's templates require."""
        return messages


TOOL_FORMATS: Registry[type[ToolFormat]] = Registry("tool_format", "chairlift.text.tool_formats", separator="_")
DEFAULT_FORMAT = "hermes"  # the most widespread


def choose_format(template: str, name: str | None = None) -> ToolFormat:
    """Return the format called `name`, or the one recognised from the chat template. For a template that neither has a
    known format nor shows tools, `tools/tool_use.py` describes the default one in the prompt."""
    if name is not None:
        return TOOL_FORMATS.get(name)(template)
    formats = sorted(map(TOOL_FORMATS.get, TOOL_FORMATS.names()), key=lambda format_: format_.order)
    found = next(format_ for format_ in formats if format_.recognises(template))
    return (TOOL_FORMATS.get(DEFAULT_FORMAT) if found.fallback and "tools" not in template else found)(template)


def with_text_content(messages: list[Message]) -> list[Message]:
    """Give messages that have only calls an empty content, for templates that read the content of every message."""
    return [{**message, "content": message["content"] or ""} for message in messages]
