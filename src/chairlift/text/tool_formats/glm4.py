"""GLM-4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, literal, repeated
from chairlift.text.tools.reader import Reading
from chairlift.text.tools.tagged_calls import TaggedCallParser, Tags, tagged_rules, write_tagged
from chairlift.text.tools.tool import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_KEY = "<arg_key>"
_TAGS = Tags(OPENING, "\n", _KEY, "</arg_key>\n<arg_value>", "</arg_value>\n", CLOSING)


class GLMParser(TaggedCallParser):
    openings = (OPENING,)
    tags = _TAGS

    def read_calls(self) -> Reading[None]:
        yield from self.read_tagged_call()


@TOOL_FORMATS.register("glm4")
class GLMFormat(ToolFormat):
    order = 8
    parser = GLMParser
    markers = (OPENING, CLOSING, _KEY, "</arg_key>", "<arg_value>", "</arg_value>")

    @staticmethod
    def recognises(template: str) -> bool:
        return OPENING in template and _KEY in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        inner = Tags("", _TAGS.name_end, _TAGS.key, _TAGS.key_end, _TAGS.value_end, "")
        call = f"call: tagged {marker(CLOSING)}"
        calls = repeated("call", f"{literal(chr(10))} {marker(OPENING)}", parallel)
        return CallGrammar.of_marker(OPENING, marker, calls, [call, *tagged_rules(tools, inner)])

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(write_tagged(*call, _TAGS) for call in calls)

    def history(self, messages: list[Message]) -> list[Message]:
        return with_text_content(messages)
