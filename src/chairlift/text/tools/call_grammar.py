"""Grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.tool import Tool

Marker = Callable[[str], str]  # spells a marker such as <tool_call> in a grammar: as one token, or as its letters

MAX_CALLS = 16  # A weak model may repeat a call until its context is full.

# The white space that chat templates use. Without a limit, a weak model may generate only line breaks.
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def call_object(name: str, arguments: str, arguments_key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{arguments_key}": {arguments}}}'


def literal(text: str) -> str:
    return json.dumps(text)


def repeated(call: str, separator: str, parallel: bool) -> str:
    """A rule for one call, or for several if `parallel`."""
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def one_of(rules: Iterable[str]) -> str:
    return " | ".join(rules)


@dataclass(frozen=True, slots=True)
class CallStart:
    """One way in which calls begin, and the rest of them."""

    rule: str  # how they begin, in Lark: a marker's token, or text
    pattern: str  # the same as a regular expression, without slashes
    rest: str  # what follows, in Lark

    @property
    def is_token(self) -> bool:
        """Whether they begin with a marker that is a token, which does not occur in text."""
        return self.rule.startswith("<[")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A grammar for one or several calls, alone or after content."""

    starts: Sequence[CallStart]
    rules: Sequence[str]

    @classmethod
    def of_marker(cls, text: str, marker: Marker, rest: str, rules: Sequence[str]) -> CallGrammar:
        """Calls that begin with a marker."""
        return cls([CallStart(marker(text), pattern(text), rest)], rules)

    @property
    def calls(self) -> str:
        return one_of(f"{start.rule} {start.rest}" for start in self.starts)

    def forced(self) -> str:
        """A grammar for calls only."""
        return "\n".join([f"start: {self.calls}", *self.rules])

    def or_json(self, schema: dict[str, Any], header: str = "") -> str:
        """A grammar for calls or for content that is JSON, which may have a header."""
        start = [f"start: {self.calls} | {header} answer", f"answer: {json_value(schema, strict=True)}"]
        return "\n".join([*start, *self.rules])

    def after_content(self, header: str = "") -> str:
        """A grammar for content, which may have a header, or calls, which may follow content without one. Content ends
        where a call begins: from there on, only a complete call is allowed."""
        begins = "|".join(start.pattern for start in self.starts)
        choices, heads = [f"{header} CONTENT?"], []
        for index, start in enumerate(self.starts):
            if start.is_token:
                choices.append(f"{'' if header else 'CONTENT?'} {start.rule} {start.rest}")
            else:
                choices.append(f"head_{index} {start.rest}")
                heads.append(f"head_{index}[lazy]: /(?s:.*){start.pattern}/")
        content = f"CONTENT: /(?s:.+)/ & ~/(?s:.*)({begins})(?s:.*)/"
        return "\n".join([f"start: {one_of(choices)}", content, *heads, *self.rules])


def call_objects(tools: Sequence[Tool], arguments_key: str, name_key: str = "name") -> list[str]:
    """The rule `object` for {"name": …, "arguments": …}, and the rules that it needs."""
    calls = [f"{_begin(tool, name_key)} {_end(index, arguments_key)}" for index, tool in enumerate(tools)]
    return [f"object: {one_of(calls)}", *arguments_rules(tools)]


def bare_objects(tools: Sequence[Tool], arguments_key: str, separator: str, parallel: bool) -> CallGrammar:
    """A grammar for objects as of `call_objects` without any marker."""
    more = f"({literal(separator)} object){{0,{MAX_CALLS - 1}}}" if parallel else ""
    starts = [
        CallStart(
            _begin(tool),
            rf'\{{\s*"name"\s*:\s*{pattern(json.dumps(tool.name))}',
            f"{_end(index, arguments_key)} {more}",
        )
        for index, tool in enumerate(tools)
    ]
    return CallGrammar(starts, call_objects(tools, arguments_key))


def _begin(tool: Tool, name_key: str = "name") -> str:
    # Split into the tokens of JSON, so that a call can share a prefix with other allowed JSON.
    return " ".join(map(literal, ["{", json.dumps(name_key), ": ", json.dumps(tool.name)]))


def _end(index: int, arguments_key: str) -> str:
    return " ".join([*map(literal, [", ", json.dumps(arguments_key), ": "]), f"arguments_{index}", literal("}")])


def arguments_rules(tools: Sequence[Tool]) -> list[str]:
    """`arguments_0`, … for the tools' schemas. Each is a separate document, so its internal references work."""
    return [f"arguments_{index}: {json_value(tool.schema, tool.strict)}" for index, tool in enumerate(tools)]


def json_value(schema: dict[str, Any], strict: bool) -> str:
    """A rule for a schema. Unless it is strict, keywords that llguidance cannot enforce are ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": not strict}})


def pattern(text: str) -> str:
    """A regular expression, within slashes, that matches this text."""
    return re.escape(text).replace("/", r"\/")


def marker_speller(tokenizer: Tokenizer) -> Marker:
    """Return the function that spells markers with a tokenizer's tokens."""

    def spell(text: str) -> str:
        token = tokenizer.added_token_id(text)
        return f"<[{token}]>" if token in tokenizer.marker_ids else literal(text)

    return spell
