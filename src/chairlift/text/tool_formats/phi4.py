"""Phi-4-mini: <|tool_call|>[{"name": …, "arguments": …}, …]<|/tool_call|>, or functools[…]."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, ToolFormat
from chairlift.text.tools.call_grammar import CallGrammar, Marker, call_object, call_objects, literal, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

CALLS, CALLS_END, FUNCTIONS = "<|tool_call|>", "<|/tool_call|>", "functools"


class PhiParser(CallParser):
    openings = (CALLS, f"{FUNCTIONS}[")
    closing = CALLS_END

    def read_calls(self) -> Reading[None]:
        opening = yield from self.reader.one_word(CALLS, FUNCTIONS)
        yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_object()
        if opening == CALLS:
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(CALLS_END)
            self.reader.take()


@TOOL_FORMATS.register("phi4")
class PhiFormat(ToolFormat):
    order = 50
    parser = PhiParser
    markers = (CALLS, CALLS_END)

    @staticmethod
    def recognises(template: str) -> bool:
        return CALLS_END in template or "<|/tool|>" in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        calls = repeated("object", literal(", "), parallel)
        rest = f"{literal('[')} {calls} {literal(']')} {marker(CALLS_END)}"
        return CallGrammar.of_marker(CALLS, marker, rest, call_objects(tools, "arguments"))

    def write(self, calls: Sequence[Call]) -> str:
        return f"{CALLS}[{', '.join(call_object(*call, 'arguments') for call in calls)}]{CALLS_END}"
