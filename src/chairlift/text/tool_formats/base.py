"""What a format of tool calls has to say for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from chairlift.text.tools.call_grammar import Marker
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.tool import Tool

Message = dict[str, Any]
Call = tuple[str, str]  # a function's name, and its arguments as JSON


class ToolFormat(ABC):
    """How the models of one family write tool calls."""

    name: ClassVar[str]
    parser: ClassVar[type[CallParser]]
    markers: ClassVar[tuple[str, ...]] = ()  # may be special tokens, which are part of the text all the same

    def __init__(self, template: str) -> None:
        self.template = template

    @staticmethod
    @abstractmethod
    def wrote(template: str) -> bool:
        """Whether a chat template is one of this family's."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> str:
        """A Lark grammar for one call of one of the tools, or for several if `parallel`."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """The text that a model of this family writes to make these calls."""

    def history(self, messages: list[Message]) -> list[Message]:
        """Checked messages, with what this family's templates are particular about put right."""
        return messages
