"""Calls as a Python list, [get_weather(city="Oslo", days=2), get_time()]."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from chairlift.text.tool_formats.base import TOOL_FORMATS, ToolFormat
from chairlift.text.tools.call_grammar import (
    MAX_CALLS,
    CallGrammar,
    CallLayout,
    CallStart,
    Marker,
    json_value,
    literal,
    one_of,
    pattern,
)
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import MAX_DEPTH, NAME, SPACES, NotACall, Reader, Reading
from chairlift.text.tools.tool import Tool, property_schema, types_of

_CLOSING = {")": "(", "]": "[", "}": "{"}


@TOOL_FORMATS.register("pythonic")
class PythonicFormat(ToolFormat):
    """Llama 3.2 and 4. Arguments are translated to JSON, one by one."""

    order = 25
    signs = ("func_name1(",)
    markers = ("<|python_start|>", "<|python_end|>")
    openings = (markers[0], "[")
    verbatim = False
    single_calls = True
    layout = CallLayout("$name($arguments)", opening="[", between=", ", closing="]")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        start, end = self.markers
        marked = (yield from calls.reader.one_word(start, "[")) == start
        if marked:
            yield from calls.reader.run(SPACES)
            yield from calls.reader.one_of("[")
        while True:
            yield from calls.reader.run(SPACES)
            name = yield from calls.reader.run(NAME)
            calls.check_name(name)
            yield from calls.reader.one_of("(")
            yield from calls.translate_arguments(name, _arguments(calls))
            yield from calls.reader.run(SPACES)
            if (yield from calls.reader.one_of(",]")) == "]":
                break
        calls.reader.take()
        if marked:
            yield from calls.read_end(end)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        more = f"({literal(', ')} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        starts, calls, rules = [], [], []
        for index, tool in enumerate(tools):
            begin, arguments = f"[{tool.name}(", f"arguments_{index}"
            starts.append(CallStart(literal(begin), pattern(begin), f"{arguments} {more} {literal(']')}"))
            calls.append(f"{literal(f'{tool.name}(')} {arguments}")
            rules += _arguments_rules(arguments, tool)
        return CallGrammar(starts, [f"call: {one_of(calls)}", *rules])

    def written_arguments(self, arguments: str) -> str:
        return ", ".join(f"{key}={_written(value)}" for key, value in json.loads(arguments).items())


def _arguments(calls: CallParser) -> Reading[None]:
    before, reader = "", calls.reader
    yield from reader.run(SPACES)
    if (yield from reader.peek()) == ")":
        reader.at += 1
        return
    while True:
        yield from reader.run(SPACES)
        key = yield from reader.run(NAME)
        yield from reader.run(SPACES)
        yield from reader.one_of("=")
        start = reader.at
        yield from _expression(reader)
        value = _as_json(reader.text[start : reader.at].strip())
        calls.emit_arguments(f"{before}{json.dumps(key)}: {value}")
        before = ", "
        if (yield from reader.one_of(",)")) == ")":
            return
        reader.take()


def _expression(reader: Reader) -> Reading[None]:
    """Read a literal up to the comma or parenthesis after it."""
    opened: list[str] = []
    while True:
        character = yield from reader.peek()
        if not character or len(opened) > MAX_DEPTH:
            raise NotACall
        if not opened and character in ",)":
            return
        reader.at += 1
        if character in "([{":
            opened.append(character)
        elif character in _CLOSING:
            if not opened or opened.pop() != _CLOSING[character]:
                raise NotACall
        elif character in "\"'":
            yield from _string(reader, character)


def _string(reader: Reader, quote: str) -> Reading[None]:
    while True:
        character = yield from reader.peek()
        if not character:
            raise NotACall
        reader.at += 1
        if character == quote:
            return
        if character == "\\":
            if not (yield from reader.peek()):
                raise NotACall
            reader.at += 1


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
