"""Calls as bare JSON, {"name": …, "arguments": …}, which most models write without special training."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, ToolFormat
from chairlift.text.tools.call_grammar import CallGrammar, Marker, bare_objects, call_object
from chairlift.text.tools.call_parser import BareJSONParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

_FENCE, _FENCE_END = "```json", "```"


class JSONParser(BareJSONParser):
    openings = (_FENCE, "[", "{")

    def read_calls(self) -> Reading[None]:
        fenced = (yield from self.reader.peek()) == _FENCE[0]
        if fenced:
            yield from self.reader.literal(_FENCE)
            yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_objects()
        if fenced:
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(_FENCE_END)
            self.reader.take()


@TOOL_FORMATS.register("json")
class JSONFormat(ToolFormat):
    """{"name": …, "arguments": …}, alone, in lines, in a list or in a code fence: for unknown templates."""

    order = 1000
    fallback = True
    parser = JSONParser

    @staticmethod
    def recognises(template: str) -> bool:
        return True

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        return bare_objects(tools, "arguments", "\n", parallel)

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(call_object(*call, "arguments") for call in calls)
