"""Kimi K2: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>, in a section."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tools.call_grammar import CallGrammar, Marker, arguments_rules, literal, one_of, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"[a-zA-Z0-9_.:-]*")


class KimiParser(CallParser):
    openings = (CALLS,)
    closing = CALL_END

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(CALLS)
        while True:
            yield from self.reader.run(SPACES)
            if (yield from self.reader.one_word(CALL, CALLS_END)) == CALLS_END:
                self.reader.take()
                return
            yield from self.reader.run(SPACES)
            call_id = yield from self.reader.run(_ID)
            name = call_id.removeprefix("functions.").rsplit(":", 1)[0]
            self.check_name(name)
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(ARGUMENTS)
            yield from self.reader.run(SPACES)
            yield from self.stream_arguments(name)
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(CALL_END)
            self.reader.take()


@TOOL_FORMATS.register("kimi_k2")
class KimiFormat(ToolFormat):
    order = 6
    parser = KimiParser
    markers = (CALLS, CALLS_END, CALL, CALL_END, ARGUMENTS)

    @staticmethod
    def recognises(template: str) -> bool:
        return CALLS in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        calls = [
            f"{literal(f'functions.{tool.name}:')} CALL_NUMBER {marker(ARGUMENTS)} arguments_{index}"
            for index, tool in enumerate(tools)
        ]
        rules = [
            f"call: {marker(CALL)} ({one_of(calls)}) {marker(CALL_END)}",
            "CALL_NUMBER: /[0-9]{1,3}/",
            *arguments_rules(tools),
        ]
        return CallGrammar.of_marker(CALLS, marker, f"{repeated('call', '', parallel)} {marker(CALLS_END)}", rules)

    def write(self, calls: Sequence[Call]) -> str:
        written = [
            f"{CALL}functions.{name}:{index}{ARGUMENTS}{arguments}{CALL_END}"
            for index, (name, arguments) in enumerate(calls)
        ]
        return f"{CALLS}{''.join(written)}{CALLS_END}"

    def history(self, messages: list[Message]) -> list[Message]:
        """Give calls the ids that the templates write into the prompt: functions.name:0, functions.name:1, …"""
        ids: dict[object, str] = {}
        changed = []
        for message in with_text_content(messages):
            copy = dict(message)
            if "tool_calls" in message:
                calls = []
                for call in message["tool_calls"]:
                    own = f"functions.{call['function']['name']}:{len(ids)}"
                    calls.append({**call, "id": ids.setdefault(call.get("id", own), own)})
                copy["tool_calls"] = calls
            if message.get("tool_call_id") in ids:
                copy["tool_call_id"] = ids[message["tool_call_id"]]
            changed.append(copy)
        return changed
