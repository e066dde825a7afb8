"""Calls whose arguments are tagged one by one, as <parameter=city>Oslo</parameter>: parser and grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from chairlift.errors import InvalidParameter
from chairlift.text.tools.call_grammar import json_value, literal, one_of, pattern
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, NotACall, Reading, prefix_at_end
from chairlift.text.tools.tool import Tool, as_json, is_text, property_schema

_NAME = re.compile(r"[a-zA-Z0-9_-]*")


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


class TaggedCallParser(CallParser):
    """Translates tagged arguments to JSON: strings as they arrive, other values once they are complete."""

    verbatim = False
    tags: ClassVar[Tags]

    def read_tagged_call(self) -> Reading[None]:
        """Read one call, from its name tag to its end tag."""
        tags = self.tags
        yield from self.reader.literal(tags.name.strip())
        yield from self.reader.run(SPACES)
        name = yield from self.reader.run(_NAME)
        self.check_name(name)
        if tags.name_end.strip():
            yield from self.reader.literal(tags.name_end.strip())
        self.begin_call(name)
        self.emit_arguments("{")
        self.reader.take()
        try:
            yield from self._arguments(self.schemas.get(name, {}))
        except NotACall:
            if not self.reader.over:
                self.emit_arguments("}")
            raise
        self.emit_arguments("}")
        self.reader.take()

    def _arguments(self, schema: Mapping[str, Any]) -> Reading[None]:
        tags, first = self.tags, True
        while True:
            yield from self.reader.run(SPACES)
            if (yield from self.reader.one_word(tags.key, tags.end.strip())) != tags.key:
                return
            start = self.reader.at
            if not (yield from self.reader.until(tags.key_end.strip().split()[0])):
                raise NotACall
            key = self.reader.text[start : self.reader.at].strip()
            for part in tags.key_end.split():
                yield from self.reader.run(SPACES)
                yield from self.reader.literal(part)
            if tags.line:
                yield from self._optional_line()
            self.reader.take()
            self.emit_arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            yield from self._value(property_schema(schema, key))

    def _optional_line(self) -> Reading[None]:
        if (yield from self.reader.peek()) == self.tags.line:
            self.reader.at += 1

    def _value(self, schema: Mapping[str, Any]) -> Reading[None]:
        """Read a value up to its end tag and emit it as JSON."""
        end, text = self.tags.value_end.strip(), is_text(schema)
        if text:
            self.emit_arguments('"')
        while text and self.reader.text.find(end) < 0 and not self.reader.over:
            held = max(prefix_at_end(self.reader.text, self.tags.line + end), prefix_at_end(self.reader.text, end))
            self.reader.at = len(self.reader.text) - held
            self.emit_arguments(_escaped(self.reader.take()))
            yield
        found = yield from self.reader.until(end)
        value = self.reader.take()
        if not found:  # truncated
            self.emit_arguments(_escaped(value) if text else "")
            raise NotACall
        value = value.removesuffix(self.tags.line)
        self.emit_arguments(_escaped(value) + '"' if text else as_json(value, schema))
        yield from self.reader.literal(end)
        self.reader.take()


def _whole(expression: str) -> str:
    """Return a regular expression for texts in which `expression` matches a part, as JSON schemas mean it."""
    start = "" if expression.startswith("^") else "(?s:.*)"
    end = "" if expression.endswith("$") and not expression.endswith("\\$") else "(?s:.*)"
    inner = expression.removeprefix("^") if not start else expression
    inner = inner if end else inner.removesuffix("$")
    return re.sub(r"(?<!\\)/", r"\/", f"{start}(?:{inner}){end}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def write_tagged(name: str, arguments: str, tags: Tags) -> str:
    """Return a call as a model writes it."""
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in json.loads(arguments).items()
    }
    tagged = [
        f"{tags.key}{key}{tags.key_end}{tags.line}{value}{tags.line}{tags.value_end}" for key, value in values.items()
    ]
    return f"{tags.name}{name}{tags.name_end}{''.join(tagged)}{tags.end}"


def tagged_rules(tools: Sequence[Tool], tags: Tags) -> list[str]:
    """The rule `tagged` for a call of one of the tools, and the rules that it needs.

    Arguments come in the order of the schema; those that it does not name are not allowed.
    """
    rules, calls = [], []
    for index, tool in enumerate(tools):
        required = tool.schema.get("required", [])
        properties = tool.schema.get("properties", {})
        arguments = []
        for number, key in enumerate(properties):
            rule = f"argument_{index}_{number}"
            arguments.append(rule if key in required else f"{rule}?")
            before = literal(f"{tags.key}{key}{tags.key_end}{tags.line}")
            rules.append(f"{rule}: {before} {rule}_value")
            rules += _value_rules(f"{rule}_value", property_schema(tool.schema, key), tags, tool.strict)
        calls.append(f"{literal(f'{tags.name}{tool.name}{tags.name_end}')} {' '.join(arguments)} {literal(tags.end)}")
    return [f"tagged: {one_of(calls)}", *rules]


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
