"""Translate a request's structure to a grammar in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from chairlift.core.sampling.structure import Structure, StructureKind

MAX_DEPTH = 64  # nesting depth of a schema

# Between two tokens of JSON: nothing, a space, or a line break with indentation. With unbounded white space, a small
# model could generate nothing else.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\n[ ]{0,20}", "coerce_one_of": True}

# Without this, llguidance forces text without alternatives to its canonical tokens, in time proportional to the text:
# seconds per token for a{100000}. Must come last, so that it is not overridden.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


class BadStructure(ValueError):
    """A structure is invalid; the message is shown to the client."""


def grammar_of(structure: Structure, eos_ids: Sequence[int] = ()) -> str:
    """Return the grammar of a structure; raises BadStructure. No token of `eos_ids` may precede the structure."""
    try:
        return (_rules_after(structure, eos_ids) if structure.before else _rules(structure)) + _NO_FORCING
    except RecursionError:
        raise BadStructure("is nested too deeply") from None


def _rules_after(structure: Structure, eos_ids: Sequence[int]) -> str:
    """The rules of a structure that other output precedes: nested, so that no names collide."""
    ends = "".join(f",{token}" for token in eos_ids)
    before = re.sub(r"<\[\^([\d,]+)\]>", rf"<[^\g<1>{ends}]>", structure.before)
    return f"start: before structure\n{before}\nstructure: %lark {{\n{_rules(structure)}\n}}"


def _rules(structure: Structure) -> str:
    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return _json_rule({"type": "object"})
        case StructureKind.JSON_SCHEMA:
            return _json_rule(_schema(structure.text))
        case StructureKind.REGEX:
            return _regex_rule(structure.text)
        case StructureKind.CHOICE:
            # One terminal is much faster than a rule with many alternatives.
            return "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, _choices(structure.text)))
        case StructureKind.GRAMMAR:
            return _lark(structure.text)


def _json_rule(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _schema(text: str) -> dict[str, Any]:
    schema = _parsed(text)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise BadStructure("a JSON schema must be an object" if schema is not False else "the schema allows nothing")
    if _depth(schema) > MAX_DEPTH:
        raise BadStructure(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if "x-guidance" in schema:
        raise BadStructure("x-guidance is not a keyword of JSON schemas")
    return schema


def _choices(text: str) -> list[str]:
    choices = _parsed(text)
    if not isinstance(choices, list) or not choices:
        raise BadStructure("must be a list with at least one choice")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise BadStructure("choices must be non-empty strings")
    return choices


def _regex_rule(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern, 'd')}/"  # d: \d matches 0 to 9 only


def _lark(text: str) -> str:
    if not re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises exceptions of any type
        raise BadStructure(f"is not valid GBNF: {error}") from None
    return lark


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadStructure(f"is not valid JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth
