"""MiniMax-M2: <minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke> …."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, literal, repeated
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tagged_calls import TaggedCallParser, Tags, tagged_rules, write_tagged
from chairlift.text.tools.tool import Tool

OPENING, CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGS = Tags('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>")


class MiniMaxParser(TaggedCallParser):
    openings = (OPENING,)
    tags = _TAGS

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(OPENING)
        while True:
            yield from self.reader.run(SPACES)
            if (yield from self.reader.one_word(_TAGS.name, CLOSING)) == CLOSING:
                self.reader.take()
                return
            self.reader.at -= len(_TAGS.name)
            yield from self.read_tagged_call()


@TOOL_FORMATS.register("minimax")
class MiniMaxFormat(ToolFormat):
    order = 7
    parser = MiniMaxParser
    markers = (OPENING, CLOSING)

    @staticmethod
    def recognises(template: str) -> bool:
        return OPENING in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        line = literal("\n")
        rest = f"{line} {repeated('tagged', line, parallel)} {line} {marker(CLOSING)}"
        return CallGrammar.of_marker(OPENING, marker, rest, tagged_rules(tools, _TAGS))

    def write(self, calls: Sequence[Call]) -> str:
        written = "\n".join(write_tagged(*call, _TAGS) for call in calls)
        return f"{OPENING}\n{written}\n{CLOSING}"

    def history(self, messages: list[Message]) -> list[Message]:
        return with_text_content(messages)
