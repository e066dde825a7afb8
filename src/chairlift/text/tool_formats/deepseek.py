"""DeepSeek: <｜tool▁calls▁begin｜> and for each call <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>.

Before V3.1, a call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>name and the arguments in a ```json block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, ToolFormat
from chairlift.text.tools.call_grammar import CallGrammar, Marker, arguments_rules, literal, one_of, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "```json", "```"
_NAME = re.compile(r"[a-zA-Z0-9_-]*")


class DeepSeekParser(CallParser):
    openings = (CALLS, CALL)
    closing = CALL_END

    def read_calls(self) -> Reading[None]:
        begun = yield from self.reader.one_word(CALLS, CALL)
        while True:
            yield from self.reader.run(SPACES)
            if begun == CALLS:
                begun = yield from self.reader.one_word(CALL, CALLS_END)
            if begun == CALLS_END:
                self.reader.take()
                return
            yield from self._call()
            begun = CALLS

    def _call(self) -> Reading[None]:
        name = yield from self.reader.run(_NAME)
        yield from self.reader.literal(SEPARATOR)
        yield from self.reader.run(SPACES)
        fenced = (yield from self.reader.peek()) != "{"
        if fenced:  # the word before was "function"
            name = yield from self.reader.run(_NAME)
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(_FENCE)
            yield from self.reader.run(SPACES)
        self.check_name(name)
        yield from self.stream_arguments(name)
        yield from self.reader.run(SPACES)
        if fenced:
            yield from self.reader.literal(_FENCE_END)
            yield from self.reader.run(SPACES)
        yield from self.reader.literal(CALL_END)
        self.reader.take()


@TOOL_FORMATS.register("deepseek")
class DeepSeekFormat(ToolFormat):
    order = 5
    parser = DeepSeekParser
    markers = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

    @staticmethod
    def recognises(template: str) -> bool:
        return CALLS in template

    @property
    def _fenced(self) -> bool:
        return _FENCE in self.template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        calls = [self._call(index, tool.name, marker) for index, tool in enumerate(tools)]
        rules = [f"call: {marker(CALL)} ({one_of(calls)}) {marker(CALL_END)}", *arguments_rules(tools)]
        separator = literal("\n") if self._fenced else ""
        rest = f"{repeated('call', separator, parallel)} {marker(CALLS_END)}"
        return CallGrammar.of_marker(CALLS, marker, rest, rules)

    def _call(self, index: int, name: str, marker: Marker) -> str:
        if not self._fenced:
            return f"{literal(name)} {marker(SEPARATOR)} arguments_{index}"
        before, after = literal(f"{name}\n{_FENCE}\n"), literal(f"\n{_FENCE_END}")
        return f"{literal('function')} {marker(SEPARATOR)} {before} arguments_{index} {after}"

    def write(self, calls: Sequence[Call]) -> str:
        if not self._fenced:
            written = [f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}" for name, arguments in calls]
            return f"{CALLS}{''.join(written)}{CALLS_END}"
        fenced = [f"{name}\n{_FENCE}\n{arguments}\n{_FENCE_END}" for name, arguments in calls]
        lines = "\n".join(f"{CALL}function{SEPARATOR}{call}{CALL_END}" for call in fenced)
        return f"{CALLS}{lines}{CALLS_END}"
