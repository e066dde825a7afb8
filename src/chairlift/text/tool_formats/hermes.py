"""Hermes, Qwen and many others: <tool_call> {"name": …, "arguments": …} </tool_call>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, call_object, call_objects, literal, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_STRAY_BRACES = re.compile(r"[\s}]*")


class HermesParser(CallParser):
    openings = (OPENING,)
    closing = CLOSING

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(OPENING)
        yield from self.reader.run(SPACES)
        yield from self.read_object()
        yield from self.reader.run(_STRAY_BRACES)
        self.reader.take()
        yield from self.reader.literal(CLOSING)
        self.reader.take()


@TOOL_FORMATS.register("hermes")
class HermesFormat(ToolFormat):
    order = 10  # Families with other calls between the same tags come first.
    parser = HermesParser
    markers = (OPENING, CLOSING)

    @staticmethod
    def recognises(template: str) -> bool:
        return OPENING in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        line = literal("\n")
        rest = f"call: {line} object {line} {marker(CLOSING)}"
        calls = repeated("call", f"{line} {marker(OPENING)}", parallel)
        return CallGrammar.of_marker(OPENING, marker, calls, [rest, *call_objects(tools, "arguments")])

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{OPENING}\n{call_object(*call, 'arguments')}\n{CLOSING}" for call in calls)

    def history(self, messages: list[Message]) -> list[Message]:
        return with_text_content(messages)
