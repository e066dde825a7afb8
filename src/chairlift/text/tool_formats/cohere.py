"""Command: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": …}, …]<|END_ACTION|>."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, arguments_rules, literal, one_of, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

_PARAMETERS, _LINE, _LIST_END = '"parameters": ', "\n    ", "\n]"
CALLS, CALLS_END = "<|START_ACTION|>", "<|END_ACTION|>"


class CohereParser(CallParser):
    openings = (CALLS,)
    closing = CALLS_END
    name_key = "tool_name"

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(CALLS)
        yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_object()
        yield from self.reader.run(SPACES)
        yield from self.reader.literal(CALLS_END)
        self.reader.take()


@TOOL_FORMATS.register("cohere")
class CohereFormat(ToolFormat):
    order = 40
    parser = CohereParser
    markers = (CALLS, CALLS_END)

    @staticmethod
    def recognises(template: str) -> bool:
        return CALLS in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        calls = []
        for index, tool in enumerate(tools):
            number, name = literal('{"tool_call_id": "'), literal(f'", "tool_name": {json.dumps(tool.name)}, ')
            arguments = f"{literal(_PARAMETERS)} arguments_{index} {literal('}')}"
            calls.append(f"{number} CALL_NUMBER {name} {arguments}")
        objects = repeated("object", literal(f",{_LINE}"), parallel)
        rest = f"{literal(f'[{_LINE}')} {objects} {literal(_LIST_END)} {marker(CALLS_END)}"
        rules = [f"object: {one_of(calls)}", "CALL_NUMBER: /[0-9]{1,2}/", *arguments_rules(tools)]
        return CallGrammar.of_marker(CALLS, marker, rest, rules)

    def write(self, calls: Sequence[Call]) -> str:
        objects = [
            f'{{"tool_call_id": "{index}", "tool_name": {json.dumps(name)}, {_PARAMETERS}{arguments}}}'
            for index, (name, arguments) in enumerate(calls)
        ]
        return f"{CALLS}[{_LINE}{f',{_LINE}'.join(objects)}{_LIST_END}{CALLS_END}"

    def shown(self, tool: Tool) -> dict[str, Any]:
        # These templates read the description and the parameters of every tool.
        function = {"description": "", **tool.given["function"], "parameters": tool.schema}
        return {**tool.given, "function": function}

    def history(self, messages: list[Message]) -> list[Message]:
        return with_text_content(messages)
