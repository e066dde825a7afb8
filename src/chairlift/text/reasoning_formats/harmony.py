"""gpt-oss: messages in channels, <|channel|>analysis<|message|>…<|end|> and <|channel|>final<|message|>…<|return|>."""

from __future__ import annotations

import re
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.text.assistant_parts import AssistantParser, AssistantPart
from chairlift.text.reasoning_formats.base import (
    REASONING_FORMATS,
    Message,
    Phase,
    ReasoningFormat,
    TrimmedReasoning,
    reasoning_rules,
    renamed_reasoning,
)
from chairlift.text.tools.call_grammar import Marker, literal
from chairlift.text.tools.reader import first_of

CHANNEL, MESSAGE, START, END, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"
_ANALYSIS, _FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
_CALL = "<|call|>"
_ENDS = (END, _CALL, "<|return|>")
_HEADERS = (CHANNEL, START, "to=", "assistant")  # how a message's header begins
_RECIPIENT = re.compile(r"to=(?:functions\.)?([a-zA-Z0-9_-]+)")
_NAME = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")


@REASONING_FORMATS.register("harmony")
class HarmonyReasoning(ReasoningFormat):
    begins = (_ANALYSIS,)
    ends = (END,)
    order = 1
    repeats = True
    answer = _FINAL

    @classmethod
    def recognises(cls, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    @property
    def markers(self) -> tuple[str, ...]:
        return (CHANNEL, MESSAGE, START, END, CONSTRAIN)

    def phase(self, prompt: str) -> Phase:
        return Phase.OPEN if prompt.endswith(_ANALYSIS) else Phase.POSSIBLE

    def parser(self, phase: Phase, content: AssistantParser) -> AssistantParser:
        return HarmonyParser(phase, content)

    def grammar(self, phase: Phase, marker: Marker, *, preambles: bool = True) -> str:
        channel, message, start = map(marker, (CHANNEL, MESSAGE, START))
        rest = f"thought {start} {literal('assistant')}"
        first = f"{rest} " if phase is Phase.OPEN else ""
        channels = f"({literal('analysis')} | {literal('commentary')})" if preambles else literal("analysis")
        return "\n".join(
            [
                f"before: {first}before_message{{0,32}}",
                f"before_message: {channel} {channels} {message} {rest}",
                *reasoning_rules(END, marker),
            ]
        )

    def answer_header(self, marker: Marker) -> str:
        return f"{marker(CHANNEL)} {literal('final')} {marker(MESSAGE)}"

    def history(self, messages: list[Message]) -> list[Message]:
        return [renamed_reasoning(message, "thinking") for message in messages]

    def template_variables(self, effort: str, known: frozenset[str]) -> dict[str, Any]:
        """These models know three efforts; the nearest one stands for the others."""
        if effort == "none":
            raise InvalidParameter("reasoning_effort", "this model always reasons: choose low, medium or high")
        return super().template_variables({"minimal": "low", "xhigh": "high"}.get(effort, effort), known)


class HarmonyParser:
    """Sorts messages by their channel: analysis is reasoning, a message to a function is a call, others are content.

    Calls are passed to the parser of the content as `<|channel|>commentary to=functions.NAME<|message|>{…}<|call|>`.
    """

    def __init__(self, phase: Phase, content: AssistantParser) -> None:
        self._content = content
        self._held = _ANALYSIS if phase is Phase.OPEN else ""
        self._in_header = True
        self._is_reasoning = False
        self._trimmed: TrimmedReasoning | None = None
        self._call_open = False

    def push(self, text: str) -> list[AssistantPart]:
        self._held += text
        parts: list[AssistantPart] = []
        while True:
            more = self._read_header() if self._in_header else self._read_body()
            if more is None:
                return parts
            parts += more

    def close(self) -> list[AssistantPart]:
        rest, self._held = self._held, ""
        if self._in_header:  # a header without a body; text without any marker is content
            parts = [] if any(mark in rest for mark in (CHANNEL, START)) or rest.startswith(" to=") else self._add(rest)
        else:
            parts = self._add(rest)
        return parts + self._content.close()

    def _read_header(self) -> list[AssistantPart] | None:
        """Read up to the message, and None if it is incomplete."""
        at = self._held.find(MESSAGE)
        begin = (self._held if at < 0 else self._held[:at]).lstrip()
        is_header = begin.startswith(_HEADERS) or (not begin and at >= 0)
        may_be_one = at < 0 and any(mark.startswith(begin) for mark in (*_HEADERS, MESSAGE))
        if not is_header and not may_be_one:
            self._in_header = False  # a model that does not follow the format
            return []
        if at < 0:
            return None
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        self._in_header = False
        recipient, name = _RECIPIENT.search(header), _NAME.search(header)
        self._is_reasoning = recipient is None and name is not None and name[1] == "analysis"
        self._call_open = recipient is not None
        if recipient is not None:
            return self._content.push(f"{CHANNEL}commentary to=functions.{recipient[1]}{MESSAGE}")
        if self._is_reasoning:
            self._trimmed = TrimmedReasoning("\n\n" if self._trimmed else "")
        return []

    def _read_body(self) -> list[AssistantPart] | None:
        body, end, self._held = first_of(_ENDS, self._held)
        parts = self._add(body)
        if end is None:
            return parts or None
        if self._call_open:
            parts += self._content.push(_CALL)
        self._in_header, self._is_reasoning, self._call_open = True, False, False
        return parts

    def _add(self, text: str) -> list[AssistantPart]:
        if not text:
            return []
        return self._trimmed.add(text) if self._is_reasoning and self._trimmed else self._content.push(text)
