"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, literal, repeated
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tagged_calls import TaggedCallParser, Tags, tagged_rules, write_tagged
from chairlift.text.tools.tool import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_TAGS = Tags("<function=", ">\n", "<parameter=", ">", "</parameter>\n", "</function>", line="\n")


class QwenCoderParser(TaggedCallParser):
    openings = (OPENING, _TAGS.name)  # the model sometimes omits the outer tag
    tags = _TAGS

    def read_calls(self) -> Reading[None]:
        outer = (yield from self.reader.one_word(OPENING, _TAGS.name)) == OPENING
        if outer:
            yield from self.reader.run(SPACES)
        else:
            self.reader.at -= len(_TAGS.name)
        yield from self.read_tagged_call()
        if outer:
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(CLOSING)
            self.reader.take()


@TOOL_FORMATS.register("qwen3_coder")
class QwenCoderFormat(ToolFormat):
    order = 9
    parser = QwenCoderParser
    markers = (OPENING, CLOSING)

    @staticmethod
    def recognises(template: str) -> bool:
        return OPENING in template and _TAGS.name in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        line = literal("\n")
        call = f"call: {line} tagged {line} {marker(CLOSING)}"
        calls = repeated("call", f"{line} {marker(OPENING)}", parallel)
        return CallGrammar.of_marker(OPENING, marker, calls, [call, *tagged_rules(tools, _TAGS)])

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{OPENING}\n{write_tagged(*call, _TAGS)}\n{CLOSING}" for call in calls)

    def history(self, messages: list[Message]) -> list[Message]:
        return with_text_content(messages)
