"""Arguments that are written without JSON quotes: their types by the tool's schema, and their grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def property_schema(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the schema of one argument, with the definitions that it may refer to."""
    found = schema.get("properties", {}).get(key)
    found = resolved(found, schema) if isinstance(found, dict) else {}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**definitions, **found}


def resolved(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Follow references to definitions of `root`."""
    for _ in range(8):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, dict):
            return schema
        schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **target}
    return schema


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema names; empty if it allows any."""
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        found |= {_KINDS.get(type(value), "null") for value in values} if isinstance(values, list) else set()
    for keyword in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(keyword, []) if isinstance(schema.get(keyword), list) else []:
            found |= types_of(one) if isinstance(one, Mapping) else set()
    return found


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a value is always a string."""
    return types_of(schema) == {"string"}


def as_json(text: str, schema: Mapping[str, Any]) -> str:
    """Return a value that was written without quotes as JSON: by its type, or as a string if it has no other."""
    types = types_of(schema)
    if types != {"string"}:
        try:
            value = json.loads(text.strip())
        except (ValueError, RecursionError):
            value = text
        kind = "null" if value is None else _KINDS[type(value)]
        fits = kind in types or (kind == "integer" and "number" in types) or not types
        if fits and (not types or kind != "string"):
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)
