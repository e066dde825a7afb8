"""Separates reasoning between two markers, such as <think> and </think>, from the content after it."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.assistant_parts import AssistantParser, AssistantPart, ReasoningDelta
from chairlift.text.reasoning.phase import Phase
from chairlift.text.tools.reader import prefix_at_end


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
        found = [(at, end) for end in self._ends if (at := self._held.find(end)) >= 0]
        if found:
            at, end = min(found)
            parts = self._trimmed.add(self._held[:at])
            self._held, self._phase, self._after_end = self._held[at + len(end) :], Phase.CLOSED, True
            return parts
        cut = len(self._held) - max(prefix_at_end(self._held, end) for end in self._ends)
        text, self._held = self._held[:cut], self._held[cut:]
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
