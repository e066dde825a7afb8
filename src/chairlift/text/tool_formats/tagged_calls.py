"""Formats whose arguments are tagged one by one, as <parameter=city>Oslo</parameter>."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from chairlift.errors import InvalidParameter
from chairlift.text.tool_formats.base import TOOL_FORMATS, ToolFormat
from chairlift.text.tools.call_grammar import CallLayout, json_value, literal, one_of, pattern
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import NAME, SPACES, NotACall, Reading, prefix_at_end
from chairlift.text.tools.tool import Tool, as_json, is_text, property_schema


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one call, as the model writes them. White space at their ends is optional when they are read, except
    that a value ends one `line` before its end tag."""

    name: str  # It stands before the function's name.
    name_end: str
    key: str  # It stands before a parameter's name.
    key_end: str
    value_end: str
    end: str
    line: str = ""  # around each value


class TaggedFormat(ToolFormat):
    """Arguments are translated to JSON: strings as they arrive, other values once they are complete."""

    verbatim = False
    tags: ClassVar[Tags]

    def read_tagged_call(self, calls: CallParser) -> Reading[None]:
        """Read one call, from its name tag to its end tag."""
        yield from calls.reader.literal(self.tags.name.strip())
        yield from calls.reader.run(SPACES)
        name = yield from calls.reader.run(NAME)
        calls.check_name(name)
        yield from calls.reader.literal(self.tags.name_end.strip())
        yield from calls.translate_arguments(name, self._read_arguments(calls, calls.schemas.get(name, {})))

    def _read_arguments(self, calls: CallParser, schema: Mapping[str, Any]) -> Reading[None]:
        tags, reader, separator = self.tags, calls.reader, ""
        while True:
            yield from reader.run(SPACES)
            if (yield from reader.one_word(tags.key, tags.end.strip())) != tags.key:
                return
            start = reader.at
            if not (yield from reader.until(tags.key_end.strip().split()[0])):
                raise NotACall
            key = reader.text[start : reader.at].strip()
            for part in tags.key_end.split():
                yield from reader.run(SPACES)
                yield from reader.literal(part)
            if tags.line and (yield from reader.peek()) == tags.line:
                reader.at += 1
            reader.take()
            calls.emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(calls, property_schema(schema, key))

    def _read_value(self, calls: CallParser, schema: Mapping[str, Any]) -> Reading[None]:
        """Read a value up to its end tag and emit it as JSON."""
        end, line, text, reader = self.tags.value_end.strip(), self.tags.line, is_text(schema), calls.reader
        if text:
            calls.emit_arguments('"')
        while text and reader.text.find(end) < 0 and not reader.over:
            held = max(prefix_at_end(reader.text, line + end), prefix_at_end(reader.text, end))
            reader.at = len(reader.text) - held
            calls.emit_arguments(_escaped(reader.take()))
            yield
        found = yield from reader.until(end)
        value = reader.take()
        if not found:  # truncated
            calls.emit_arguments(_escaped(value) if text else "")
            raise NotACall
        value = value.removesuffix(line)
        calls.emit_arguments(_escaped(value) + '"' if text else as_json(value, schema))
        yield from reader.literal(end)
        reader.take()

    def written_arguments(self, arguments: str) -> str:
        tags = self.tags
        values = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in json.loads(arguments).items()
        }
        return "".join(
            f"{tags.key}{key}{tags.key_end}{tags.line}{value}{tags.line}{tags.value_end}"
            for key, value in values.items()
        )

    def arguments_rules(self, tools: Sequence[Tool]) -> list[str]:
        """Arguments come in the order of the schema; those that it does not name are not allowed."""
        rules = []
        for index, tool in enumerate(tools):
            required = tool.schema.get("required", [])
            arguments = []
            for number, key in enumerate(tool.schema.get("properties", {})):
                rule = f"argument_{index}_{number}"
                arguments.append(rule if key in required else f"{rule}?")
                before = literal(f"{self.tags.key}{key}{self.tags.key_end}{self.tags.line}")
                rules.append(f"{rule}: {before} {rule}_value")
                rules += _value_rules(f"{rule}_value", property_schema(tool.schema, key), self.tags, tool.strict)
            rules.append(f"arguments_{index}: {' '.join(arguments) or literal('')}")
        return rules


def _whole(expression: str) -> str:
    """Return a regular expression for texts in which `expression` matches a part, as JSON schemas mean it."""
    start = "" if expression.startswith("^") else "(?s:.*)"
    end = "" if expression.endswith("$") and not expression.endswith("\\$") else "(?s:.*)"
    inner = expression.removeprefix("^") if not start else expression
    inner = inner if end else inner.removesuffix("$")
    return re.sub(r"(?<!\\)/", r"\/", f"{start}(?:{inner}){end}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value_rules(rule: str, schema: dict[str, Any], tags: Tags, strict: bool) -> list[str]:
    end = f"{tags.line}{tags.value_end}"
    if not is_text(schema):
        return [f"{rule}: {rule}_json {literal(end)}", f"{rule}_json: {json_value(schema, strict)}"]
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices:
        return [f"{rule}: {one_of(literal(f'{choice}{end}') for choice in choices)}"]
    if strict and "format" in schema:
        raise InvalidParameter("tools", f"the format {schema['format']!r:.40} cannot be enforced in a strict tool")
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    body = f"/(?s:.{{{low},{high}}})/ & ~/(?s:.*){pattern(tags.value_end.strip())}(?s:.*)/"
    if isinstance(schema.get("pattern"), str):
        body += f" & /{_whole(schema['pattern'])}/"
    return [f"{rule}[lazy]: {rule.upper()} {literal(end)}", f"{rule.upper()}: {body}"]


@TOOL_FORMATS.register("qwen3_coder")
class QwenCoderFormat(TaggedFormat):
    """Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

    order = 9
    signs = ("<tool_call>", "<function=")
    markers = ("<tool_call>", "</tool_call>")
    openings = signs  # the model sometimes omits the outer tag
    content_required = True
    tags = Tags("<function=", ">\n", "<parameter=", ">", "</parameter>\n", "</function>", line="\n")
    layout = CallLayout("<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>", between="\n")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        outer = (yield from calls.reader.one_word(*self.openings)) == "<tool_call>"
        if outer:
            yield from calls.reader.run(SPACES)
        else:
            calls.reader.at -= len(self.tags.name)
        yield from self.read_tagged_call(calls)
        if outer:
            yield from calls.read_end("</tool_call>")


@TOOL_FORMATS.register("glm4")
class GLMFormat(TaggedFormat):
    """GLM-4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

    order = 8
    signs = ("<tool_call>", "<arg_key>")
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    openings = markers[:1]
    content_required = True
    tags = Tags("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
    layout = CallLayout("<tool_call>$name\n$arguments</tool_call>", between="\n")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from self.read_tagged_call(calls)


@TOOL_FORMATS.register("minimax")
class MiniMaxFormat(TaggedFormat):
    """MiniMax-M2: <minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke> …."""

    order = 7
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    openings = markers[:1]
    content_required = True
    tags = Tags('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>")
    layout = CallLayout(
        '<invoke name="$name">\n$arguments</invoke>',
        opening="<minimax:tool_call>\n",
        between="\n",
        closing="\n</minimax:tool_call>",
    )

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal("<minimax:tool_call>")
        while True:
            yield from calls.reader.run(SPACES)
            if (yield from calls.reader.one_word(self.tags.name, self.markers[1])) != self.tags.name:
                calls.reader.take()
                return
            calls.reader.at -= len(self.tags.name)
            yield from self.read_tagged_call(calls)
