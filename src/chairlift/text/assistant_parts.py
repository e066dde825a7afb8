"""What a model's text turns out to be, piece by piece: words for the user, or calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call has begun. Calls of one answer are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


AssistantPart = ContentDelta | CallBegun | ArgumentsDelta


class AssistantParser(Protocol):
    """Reads one completion's text as it is generated. Whatever the pieces, the parts joined are the same."""

    def push(self, text: str) -> list[AssistantPart]:
        """More text; returns what is certain by now. Text that may yet begin a tool call is kept back."""
        ...

    def close(self) -> list[AssistantPart]:
        """The text is over; returns the rest."""
        ...


class PlainParser:
    """All of it is for the user: what an answer is read by when no tools were offered."""

    def push(self, text: str) -> list[AssistantPart]:
        return [ContentDelta(text)] if text else []

    def close(self) -> list[AssistantPart]:
        return []
