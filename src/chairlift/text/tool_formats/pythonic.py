"""Llama 3.2 and 4: calls as a Python list, [get_weather(city="Oslo", days=2), get_time()]."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat
from chairlift.text.tool_formats.llama3_json import one_call_at_a_time
from chairlift.text.tools.call_grammar import (
    MAX_CALLS,
    CallGrammar,
    CallStart,
    Marker,
    json_value,
    literal,
    one_of,
    pattern,
)
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import MAX_DEPTH, SPACES, NotACall, Reading
from chairlift.text.tools.tool import Tool, property_schema, types_of

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_CLOSING = {")": "(", "]": "[", "}": "{"}


class PythonicParser(CallParser):
    """Translates Python arguments to JSON, one by one."""

    openings = (START, "[")
    verbatim = False

    def read_calls(self) -> Reading[None]:
        marked = (yield from self.reader.one_word(START, "[")) == START
        if marked:
            yield from self.reader.run(SPACES)
            yield from self.reader.one_of("[")
        while True:
            yield from self.reader.run(SPACES)
            yield from self._call()
            yield from self.reader.run(SPACES)
            if (yield from self.reader.one_of(",]")) == "]":
                break
        self.reader.take()
        if marked:
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(END)
            self.reader.take()

    def _call(self) -> Reading[None]:
        name = yield from self.reader.run(_NAME)
        self.check_name(name)
        yield from self.reader.one_of("(")
        self.begin_call(name)
        self.emit_arguments("{")
        self.reader.take()
        try:
            yield from self._arguments()
        except NotACall:
            if not self.reader.over:
                self.emit_arguments("}")
            raise
        self.emit_arguments("}")
        self.reader.take()

    def _arguments(self) -> Reading[None]:
        before = ""
        yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == ")":
            self.reader.at += 1
            return
        while True:
            yield from self.reader.run(SPACES)
            key = yield from self.reader.run(_NAME)
            yield from self.reader.run(SPACES)
            yield from self.reader.one_of("=")
            start = self.reader.at
            yield from self._expression()
            value = _as_json(self.reader.text[start : self.reader.at].strip())
            self.emit_arguments(f"{before}{json.dumps(key)}: {value}")
            before = ", "
            if (yield from self.reader.one_of(",)")) == ")":
                return
            self.reader.take()

    def _expression(self) -> Reading[None]:
        """Read a literal up to the comma or parenthesis after it."""
        opened: list[str] = []
        while True:
            character = yield from self.reader.peek()
            if not character or len(opened) > MAX_DEPTH:
                raise NotACall
            if not opened and character in ",)":
                return
            self.reader.at += 1
            if character in "([{":
                opened.append(character)
            elif character in _CLOSING:
                if opened.pop() != _CLOSING[character]:
                    raise NotACall
            elif character in "\"'":
                yield from self._string(character)

    def _string(self, quote: str) -> Reading[None]:
        while True:
            character = yield from self.reader.peek()
            if not character:
                raise NotACall
            self.reader.at += 1
            if character == quote:
                return
            if character == "\\":
                if not (yield from self.reader.peek()):
                    raise NotACall
                self.reader.at += 1


def _as_json(expression: str) -> str:
    """Return a Python literal as JSON; JSON itself is accepted too."""
    value: Any
    try:
        value = json.loads(expression, strict=False)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(expression)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            raise NotACall from None
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise NotACall from None
    if any("\ud800" <= character <= "\udfff" for character in written):
        raise NotACall
    return written


@TOOL_FORMATS.register("pythonic")
class PythonicFormat(ToolFormat):
    order = 25
    parser = PythonicParser
    markers = (START, END)

    @staticmethod
    def recognises(template: str) -> bool:
        return "func_name1(" in template

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        calls = [f"{literal(f'{tool.name}(')} arguments_{index}" for index, tool in enumerate(tools)]
        more = f"({literal(', ')} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        starts = [
            CallStart(literal(f"[{tool.name}("), pattern(f"[{tool.name}("), f"arguments_{index} {more} {literal(']')}")
            for index, tool in enumerate(tools)
        ]
        rules = [f"call: {one_of(calls)}"]
        for index, tool in enumerate(tools):
            rules += _arguments_rules(f"arguments_{index}", tool)
        return CallGrammar(starts, rules)

    def write(self, calls: Sequence[Call]) -> str:
        written = []
        for name, arguments in calls:
            values = [f"{key}={_written(value)}" for key, value in json.loads(arguments).items()]
            written.append(f"{name}({', '.join(values)})")
        return f"[{', '.join(written)}]"

    def history(self, messages: list[Message]) -> list[Message]:
        return one_call_at_a_time(messages)  # these templates refuse several calls in one message


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _arguments_rules(rule: str, tool: Tool) -> list[str]:
    """Keyword arguments in the order of the schema, up to the closing parenthesis."""
    required = tool.schema.get("required", [])
    rules = []
    # What follows the arguments so far: a rule for the first argument, and one for arguments after others.
    first, later = literal(")"), literal(")")
    for number, key in reversed([*enumerate(tool.schema.get("properties", {}))]):
        argument, name = f"{rule}_{number}", f"{rule}_from_{number}"
        schema = property_schema(tool.schema, key)
        value = '"True" | "False"' if types_of(schema) == {"boolean"} else json_value(schema, tool.strict)
        rules += [f"{argument}: {literal(f'{key}=')} {argument}_value", f"{argument}_value: {value}"]
        rules.append(f"{name}: {argument} {later}" + ("" if key in required else f" | {first}"))
        comma = f"{name}_later: {literal(', ')} {argument} {later}" + ("" if key in required else f" | {later}")
        rules.append(comma)
        first, later = name, f"{name}_later"
    return [f"{rule}: {first}", *rules]
