"""gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chairlift.text.reasoning_formats.harmony import CHANNEL, CONSTRAIN, MESSAGE
from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat, with_text_content
from chairlift.text.tool_formats.llama3_json import one_call_at_a_time
from chairlift.text.tools.call_grammar import CallGrammar, Marker, arguments_rules, literal, one_of
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import NotACall, Reading
from chairlift.text.tools.tool import Tool

CALL_END = "<|call|>"
_OPENING = f"{CHANNEL}commentary to=functions."
_NAME = re.compile(r"[a-zA-Z0-9_-]*")


class HarmonyCallParser(CallParser):
    """Parses calls in the form that `reasoning_formats/harmony.py` passes on."""

    openings = (_OPENING,)
    closing = CALL_END

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(_OPENING)
        name = yield from self.reader.run(_NAME)
        self.check_name(name)
        if not (yield from self.reader.until(MESSAGE)):
            raise NotACall
        yield from self.reader.literal(MESSAGE)
        yield from self.stream_arguments(name)
        yield from self.reader.literal(CALL_END)
        self.reader.take()


@TOOL_FORMATS.register("harmony")
class HarmonyFormat(ToolFormat):
    """One call per message, which ends the turn: `parallel` has no effect."""

    order = 1
    parser = HarmonyCallParser
    markers = (CHANNEL, MESSAGE, CONSTRAIN)

    @staticmethod
    def recognises(template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        calls = [
            f"{literal(f'commentary to=functions.{tool.name} ')} {marker(CONSTRAIN)} {literal('json')} "
            f"{marker(MESSAGE)} arguments_{index}"
            for index, tool in enumerate(tools)
        ]
        return CallGrammar.of_marker(CHANNEL, marker, "call", [f"call: {one_of(calls)}", *arguments_rules(tools)])

    def write(self, calls: Sequence[Call]) -> str:
        written = [f"{_OPENING}{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL_END}" for name, arguments in calls]
        return "".join(written)

    def history(self, messages: list[Message]) -> list[Message]:
        return [_with_one_text(message) for message in with_text_content(one_call_at_a_time(messages))]


def _with_one_text(message: Message) -> Message:
    """Merge content and reasoning of a message with a call: these templates accept one of them."""
    if not (message.get("tool_calls") and message["content"] and message.get("thinking")):
        return message
    return {**message, "content": "", "thinking": f"{message['thinking']}\n\n{message['content']}"}
