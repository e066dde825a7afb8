"""The tools of a request, their arguments' types, and which of them the model may or must call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.text.messages import plain_data

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 * 2**10  # total size as JSON
MAX_SCHEMA_BYTES = 64 * 2**10
MAX_SCHEMA_DEPTH = 24
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # The Messages API allows these lengths; OpenAI allows 64.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client that the model may call."""

    name: str
    schema: dict[str, Any]  # JSON schema of the arguments, which are an object
    strict: bool  # whether to refuse a schema that cannot be enforced completely
    given: dict[str, Any]  # What the client sent, which the chat template reads.


class Calling(StrEnum):
    """Whether the model may or must call tools."""

    NONE = "none"  # the model does not see the tools
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # There must be a call.
    NAMED = "named"  # exactly one call of a given function


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The validated tool_choice of a request."""

    calling: Calling
    function: str | None = None  # set with NAMED

    @property
    def forced(self) -> bool:
        return self.calling in (Calling.REQUIRED, Calling.NAMED)


def checked_tools(tools: Any) -> list[Tool]:
    """Validate tools in the format of OpenAI's chat API: {"type": "function", "function": {"name", "parameters",
    …}}."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidParameter("tools", "must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"{len(tools)} tools; the limit is {MAX_TOOLS}")
    if _size("tools", tools) > MAX_TOOLS_BYTES:
        raise InvalidParameter("tools", f"are longer than {MAX_TOOLS_BYTES} bytes")
    checked = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names = [tool.name for tool in checked]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidParameter(f"tools[{index}].function.name", f"{name!r} is duplicated")
    return checked


def _tool(path: str, tool: Any) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidParameter(path, "must be an object of type 'function'; no other tools are supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{path}.function", "must be an object with a name")
    path += ".function"
    for key in function:
        if key not in ("name", "description", "parameters", "strict"):
            raise InvalidParameter(f"{path}.{str(key)[:40]}", "unknown parameter", "unknown_parameter")
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(f"{path}.name", "must be 1 to 128 letters, digits, _ or -")
    if not isinstance(description, str | None):
        raise InvalidParameter(f"{path}.description", "must be text", "invalid_type")
    if not isinstance(strict, bool | None):
        raise InvalidParameter(f"{path}.strict", "must be true or false", "invalid_type")
    schema = _schema(f"{path}.parameters", function.get("parameters"))
    return Tool(name, schema, bool(strict), plain_data("tools", tool))


def _schema(path: str, given: Any) -> dict[str, Any]:
    if given is None or given == {}:
        return _NO_PARAMETERS
    if not isinstance(given, dict) or given.get("type", "object") != "object":
        raise InvalidParameter(path, "must be a JSON schema of type 'object'")
    if _depth(given) > MAX_SCHEMA_DEPTH:
        raise InvalidParameter(path, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    if _size(path, given) > MAX_SCHEMA_BYTES:
        raise InvalidParameter(path, f"is longer than {MAX_SCHEMA_BYTES} bytes")
    return {"type": "object", **given}


def _size(path: str, value: Any) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False).encode())
    except RecursionError:
        raise InvalidParameter(path, "is nested too deep") from None
    except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError too
        raise InvalidParameter(path, "must be JSON of valid Unicode") from error


def _depth(value: Any) -> int:
    """Return the nesting depth of lists and objects, without recursion, since clients may send any depth."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def allowed_tools(choice: Any, tools: list[Tool]) -> tuple[Any, list[Tool]]:
    """Return what is left of OpenAI's tool_choice "allowed_tools": its mode, and the tools that it names."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, tools
    path, by_name = "tool_choice.allowed_tools", {tool.name: tool for tool in tools}
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise InvalidParameter(path, "must be an object with a mode and tools")
    if allowed.get("mode") not in ("auto", "required"):
        raise InvalidParameter(f"{path}.mode", "must be auto or required")
    names: set[str] = set()
    for index, given in enumerate(allowed["tools"]):
        function = given.get("function") if isinstance(given, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in by_name:
            raise InvalidParameter(f"{path}.tools[{index}]", "must name one of the tools")
        names.add(name)
    return allowed["mode"], [tool for tool in tools if tool.name in names]


def checked_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Validate OpenAI's tool_choice: "none", "auto", "required" or {"type": "function", "function": {"name"}}."""
    if choice is None:
        return ToolChoice(Calling.AUTO if tools else Calling.NONE)
    if choice in ("none", "auto"):
        return ToolChoice(Calling(choice) if tools else Calling.NONE)
    if not tools:
        raise InvalidParameter("tool_choice", "needs tools to choose from")
    if choice == "required":
        return ToolChoice(Calling.REQUIRED)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        shape = '{"type": "function", "function": {"name": …}}'
        raise InvalidParameter("tool_choice", f"must be 'none', 'auto', 'required' or {shape}")
    if name not in [tool.name for tool in tools]:
        raise InvalidParameter("tool_choice", f"{name[:64]!r} is not one of the tools")
    return ToolChoice(Calling.NAMED, name)


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
