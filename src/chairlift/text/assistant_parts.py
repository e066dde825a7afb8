"""The parts of a model's output: reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call has begun. The calls of one completion are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


AssistantPart = ReasoningDelta | ContentDelta | CallBegun | ArgumentsDelta


class AssistantParser(Protocol):
    """Parses one completion's text as it is generated. The joined parts do not depend on how the text is cut."""

    def push(self, text: str) -> list[AssistantPart]:
        """Add text and return the complete parts. Text that may begin a tool call or end the reasoning is held
        back."""
        ...

    def close(self) -> list[AssistantPart]:
        """End the text and return the remaining parts."""
        ...


class PlainParser:
    """Returns all text as content, for requests without tools."""

    def push(self, text: str) -> list[AssistantPart]:
        return [ContentDelta(text)] if text else []

    def close(self) -> list[AssistantPart]:
        return []
