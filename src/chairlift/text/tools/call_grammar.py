"""Grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.tool import Tool

Marker = Callable[[str], str]  # spells a marker such as <tool_call> in a grammar: as one token, or as its letters

MAX_CALLS = 16  # per completion: a weak model may repeat a call until its context is full

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


def calls_or_json(calls: str, schema: dict[str, Any], header: str = "") -> str:
    """A grammar for calls or for content that is JSON, which may have a header."""
    start = f"start: calls | {header} answer\nanswer: {json_value(schema, strict=True)}\n"
    return start + calls.replace("start:", "calls:", 1)


def call_objects(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """The rule `object` for {"name": …, "arguments": …}, and the rules that it needs."""

    def call(index: int, name: str) -> str:
        # Split into the tokens of JSON, so that a call can share a prefix with other allowed JSON.
        pieces = ["{", '"name"', ": ", json.dumps(name), ", ", json.dumps(arguments_key), ": "]
        return " ".join([*map(literal, pieces), f"arguments_{index}", literal("}")])

    calls = [call(index, tool.name) for index, tool in enumerate(tools)]
    return [f"object: {one_of(calls)}", *arguments_rules(tools)]


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
