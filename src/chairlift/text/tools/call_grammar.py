"""How calls are written, and grammars that let a model write nothing else, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chairlift.text.tools.tool import Tool

Marker = Callable[[str], str]  # how a grammar names a mark such as <tool_call>: a token of its own, or its letters

MAX_CALLS = 16  # in one answer: a weak model would make the same call again and again until its context is full

# Written as chat templates write JSON. Free white space would let a weak model write nothing but line ends.
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def call_object(name: str, arguments: str, arguments_key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{arguments_key}": {arguments}}}'


def literal(text: str) -> str:
    return json.dumps(text)


def repeated(call: str, separator: str, parallel: bool) -> str:
    """One call, or several where that is allowed."""
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def one_of(rules: Iterable[str]) -> str:
    return " | ".join(rules)


def calls_or_json(calls: str, schema: dict[str, Any]) -> str:
    """A grammar of calls, or else an answer in JSON."""
    return f"start: calls | answer\nanswer: {json_value(schema, strict=True)}\n" + calls.replace("start:", "calls:", 1)


def call_objects(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """The rule `object` for {"name": …, "arguments": …}, and what it needs."""

    def call(index: int, name: str) -> str:
        # In the pieces that JSON has, so that a call may begin like other JSON that is allowed too.
        pieces = ["{", '"name"', ": ", json.dumps(name), ", ", json.dumps(arguments_key), ": "]
        return " ".join([*map(literal, pieces), f"arguments_{index}", literal("}")])

    calls = [call(index, tool.name) for index, tool in enumerate(tools)]
    return [f"object: {one_of(calls)}", *arguments_rules(tools)]


def arguments_rules(tools: Sequence[Tool]) -> list[str]:
    """`arguments_0`, … for the tools' schemas. Each is a document of its own, so references in it still work."""
    return [f"arguments_{index}: {json_value(tool.schema, tool.strict)}" for index, tool in enumerate(tools)]


def json_value(schema: dict[str, Any], strict: bool) -> str:
    """What is not strict leaves out what the grammar engine cannot enforce, instead of being refused."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": not strict}})
