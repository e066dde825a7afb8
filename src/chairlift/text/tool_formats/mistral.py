"""Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], and since 2025 [TOOL_CALLS]name[ARGS]{…}."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat
from chairlift.text.tools.call_grammar import (
    CallGrammar,
    Marker,
    arguments_rules,
    call_object,
    call_objects,
    literal,
    one_of,
    repeated,
)
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, NotACall, Reading
from chairlift.text.tools.tool import Tool

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_ID_LENGTH = 9


class MistralParser(CallParser):
    openings = (CALLS,)
    closing = CALLS  # a call with malformed arguments ends where the next begins

    def read_calls(self) -> Reading[None]:
        yield from self.reader.literal(CALLS)
        yield from self.reader.run(SPACES)
        first = yield from self.reader.peek()
        if first == "[":
            yield from self.read_list()
        elif first == "{":
            yield from self.read_object()
        else:
            yield from self._named_call()

    def _named_call(self) -> Reading[None]:
        name = yield from self.reader.run(_NAME)
        self.check_name(name)
        # Between the name and the arguments: [CALL_ID] and an id in some versions, then [ARGS] in most.
        if (yield from self._mark(CALL_ID)):
            yield from self.reader.run(_NAME)
        yield from self._mark(ARGS)
        yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) != "{":
            raise NotACall
        yield from self.stream_arguments(name)

    def _mark(self, mark: str) -> Reading[bool]:
        """Read `mark` if it comes next; the first two characters are enough to distinguish the marks."""
        while len(self.reader.text) < self.reader.at + 2 and not self.reader.over:
            yield
        if not self.reader.text.startswith(mark[:2], self.reader.at):
            return False
        yield from self.reader.literal(mark)
        return True


@TOOL_FORMATS.register("mistral")
class MistralFormat(ToolFormat):
    order = 20
    parser = MistralParser
    markers = (CALLS, ARGS, CALL_ID)

    @staticmethod
    def recognises(template: str) -> bool:
        return CALLS in template

    @property
    def _names_first(self) -> bool:
        return ARGS in self.template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        if self._names_first:
            calls = [f"{literal(tool.name)} {marker(ARGS)} arguments_{i}" for i, tool in enumerate(tools)]
            rest = repeated("call", marker(CALLS), parallel)
            return CallGrammar.of_marker(CALLS, marker, rest, [f"call: {one_of(calls)}", *arguments_rules(tools)])
        calls_in_list = repeated("object", literal(", "), parallel)
        rest = f"{literal(' ')}? {literal('[')} {calls_in_list} {literal(']')}"
        return CallGrammar.of_marker(CALLS, marker, rest, call_objects(tools, "arguments"))

    def write(self, calls: Sequence[Call]) -> str:
        if self._names_first:
            return "".join(f"{CALLS}{name}{ARGS}{arguments}" for name, arguments in calls)
        return f"{CALLS}[{', '.join(call_object(*call, 'arguments') for call in calls)}]"

    def history(self, messages: list[Message]) -> list[Message]:
        # These templates refuse ids that are not nine letters and digits, as the ids of other servers are.
        return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [_with_short_id(call, "id") for call in message["tool_calls"]]
    return _with_short_id(changed, "tool_call_id")


def _with_short_id(item: dict[str, Any], key: str) -> dict[str, Any]:
    given = item.get(key)
    if not isinstance(given, str) or (len(given) == _ID_LENGTH and given.isalnum()):
        return item
    return {**item, key: hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]}
