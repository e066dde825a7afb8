"""Granite 3: <|tool_call|>[{"name": …, "arguments": …}, …]."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, call_object, call_objects, literal, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

CALLS = "<|tool_call|>"


class GraniteParser(CallParser):
    openings = (CALLS,)
    closing = CALLS  # a call with malformed arguments ends where the next begins

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(CALLS)
        yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_object()


@TOOL_FORMATS.register("granite")
class GraniteFormat(ToolFormat):
    order = 60
    parser = GraniteParser
    markers = (CALLS,)

    @staticmethod
    def recognises(template: str) -> bool:
        return CALLS in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        rest = f"{literal('[')} {repeated('object', literal(', '), parallel)} {literal(']')}"
        return CallGrammar.of_marker(CALLS, marker, rest, call_objects(tools, "arguments"))

    def write(self, calls: Sequence[Call]) -> str:
        return f"{CALLS}[{', '.join(call_object(*call, 'arguments') for call in calls)}]"

    def history(self, messages: list[Message]) -> list[Message]:
        return with_text_content(messages)
