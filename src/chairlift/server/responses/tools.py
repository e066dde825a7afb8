"""The tools of /v1/responses: what the model is offered for them, and the output items of its calls.

Every tool becomes a function of a chat: one of a namespace is shown by its own name, and a custom tool is a function
whose only argument is a text. This server runs no tools itself, so tools that only a server can run are left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, starmap
from typing import Any

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.openai.types import MAX_GIVEN_TOOLS
from chairlift.server.wire.unknown_fields import ignore, resembling, without_unknown

_KINDS = ("function", "custom", "namespace")
_FUNCTION_FIELDS = ("type", "name", "description", "parameters", "strict")
_CUSTOM_FIELDS = ("type", "name", "description", "format")
# All tools are shown at once, so a tool that may be loaded later, or be called directly, is as its client wants it.
_SATISFIED_FIELDS = ("defer_loading", "allowed_callers")
_NOT_RUN = "this server runs no tools itself"
ADDITIONAL_TOOLS = "additional_tools"  # an item of the input with more tools
# The one argument of a custom tool.
INPUT = "input"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the client, and its name for the model."""

    shown: str
    name: str
    namespace: str | None
    custom: bool
    location: str  # The request has the tool there.
    chat_function: dict[str, Any]
    echo: dict[str, Any]  # The response repeats it.


class OfferedTools:
    """The tools of one request that its model may call."""

    def __init__(self, tools: Iterable[tuple[str, dict[str, Any]]] = (), choice: Any = None) -> None:
        """`tools` have their locations in the request."""
        self.echo: list[dict[str, Any]] = []  # what the response repeats: all tools but those that are left out
        offered = [*islice(chain.from_iterable(starmap(self._read, tools)), MAX_GIVEN_TOOLS + 1)]
        if len(offered) > MAX_GIVEN_TOOLS:
            raise InvalidParameter("tools", f"more than {MAX_GIVEN_TOOLS} tools, with those of namespaces")
        self._tools = _with_unique_names(offered)
        check_encodable("tools", self.echo)
        check_encodable("tool_choice", choice)
        # A tool_choice names a tool by its kind, its name and its namespace, which may be left out.
        self._by_choice: dict[tuple[Any, str, str | None], OfferedTool] = {
            ("custom" if tool.custom else "function", tool.name, namespace): tool
            for tool in reversed(self._tools)
            for namespace in (None, tool.namespace)
        }
        self._choice = choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            self._choice = self._restrict(choice)
        self._by_name = {(tool.namespace, tool.name): tool for tool in self._tools}
        self._by_shown = {tool.shown: tool for tool in self._tools}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools in the form of a chat."""
        functions = [{**tool.chat_function, "name": tool.shown} for tool in self._tools]
        return [{"type": "function", "function": function} for function in functions] or None

    def chat_choice(self) -> Any:
        """Return the tool_choice in the form of a chat."""
        choice = self._choice
        if not isinstance(choice, dict):
            return None if choice == "auto" and not self else choice  # Some clients always send "auto".
        kind = choice.get("type")
        if kind not in ("function", "custom"):
            problem = "must be none, auto, required, allowed_tools, or one function or custom tool"
            raise InvalidParameter("tool_choice.type", f"{problem}, got {str(kind)[:40]!r}: {_NOT_RUN}")
        given = without_unknown("tool_choice", choice, ("type", "name", "namespace"))
        return {"type": "function", "function": {"name": self._named("tool_choice", given).shown}}

    def shown_name(self, namespace: str | None, name: str) -> str:
        """Return the name of a tool for the model, by which calls of earlier responses name it too."""
        tool = self._by_name.get((namespace, name)) or self._by_name.get((None, name))
        return name if tool is None else tool.shown

    def of_call(self, shown: str) -> OfferedTool | None:
        return self._by_shown.get(shown)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        """Translate `tools[3]…` of the chat to the tool's location in the request."""
        found = re.match(r"tools\[(\d+)\](?:\.function)?", error.parameter)
        if found is None or int(found[1]) >= len(self._tools):
            return error
        tool, rest = self._tools[int(found[1])], error.parameter[found.end() :]
        return error.renamed(tool.location + ("" if tool.custom and rest.startswith(".parameters") else rest))

    # ---- reading the request -----------------------------------------------------------------------------------

    def _read(self, location: str, given: dict[str, Any]) -> Iterator[OfferedTool]:
        if not _is_offered(location, given, _KINDS):
            return
        if given["type"] != "namespace":
            tool = _offered(location, given)
            self.echo.append(tool.echo)
            yield tool
            return
        given = without_unknown(location, given, ("type", "name", "description", "tools"))
        name, about = given.get("name"), given.get("description") or ""
        if not isinstance(name, str) or not name:
            raise InvalidParameter(f"{location}.name", "must be the name of the namespace")
        if not isinstance(about, str):
            raise InvalidParameter(f"{location}.description", "must be text", "invalid_type")
        kept = [
            _offered(place, member, name, about)
            for place, member in located_tools(f"{location}.tools", given.get("tools"))
            if _is_offered(place, member, ("function", "custom"))
        ]
        self.echo.append({**given, "description": about, "tools": [tool.echo for tool in kept]})
        yield from kept

    def _restrict(self, choice: dict[str, Any]) -> str:
        """Leave only the tools that a tool_choice allows, and return its mode."""
        choice = without_unknown("tool_choice", choice, ("type", "mode", "tools"))
        mode = choice.get("mode")
        if mode not in ("auto", "required"):
            raise InvalidParameter("tool_choice.mode", f"must be auto or required, got {str(mode)[:40]!r}")
        named = located_tools("tool_choice.tools", choice.get("tools"))
        # Tools of other types were left out.
        kept = {self._named(place, tool).shown for place, tool in named if tool.get("type") in ("function", "custom")}
        self._tools = [tool for tool in self._tools if tool.shown in kept]
        return str(mode)

    def _named(self, location: str, given: dict[str, Any]) -> OfferedTool:
        kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
        if not isinstance(name, str):
            raise InvalidParameter(location, "must have the name of a tool")
        tool = self._by_choice.get((kind, name, namespace)) if isinstance(namespace, str | None) else None
        if tool is None:
            raise InvalidParameter(location, f"{name[:64]!r} is not one of the {kind} tools")
        return tool


def located_tools(location: str, tools: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the tools of a list with the location of each."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidParameter(location, "must be a list of tools")
    if len(tools) > MAX_GIVEN_TOOLS:
        raise InvalidParameter(location, f"{len(tools)} tools; the limit is {MAX_GIVEN_TOOLS}")
    return [(f"{location}[{index}]", tool) for index, tool in enumerate(tools)]


def _is_offered(location: str, tool: dict[str, Any], kinds: Sequence[str]) -> bool:
    """Return whether the model may call a tool; one that only a server can run is left out, and that is said."""
    kind = tool.get("type")
    if kind in kinds:
        callers = tool.get("allowed_callers")
        if not isinstance(callers, list) or not callers or "direct" in callers:
            return True
        ignore(location, "only programs may call this tool, and this server runs none")
    elif not isinstance(kind, str) or not kind:
        raise InvalidParameter(f"{location}.type", f"must be one of {', '.join(kinds)}")
    elif meant := resembling(kind, kinds):
        raise InvalidParameter(f"{location}.type", f"must be one of {', '.join(kinds)}; did you mean {meant!r}?")
    else:
        ignore(f"{location}.{kind}", _NOT_RUN)
    return False


def _offered(location: str, tool: dict[str, Any], namespace: str | None = None, about: str = "") -> OfferedTool:
    """Read a function or custom tool; `about` is the description of its namespace."""
    custom = tool["type"] == "custom"
    hints = {name: value for name, value in tool.items() if name not in _SATISFIED_FIELDS}
    echo = without_unknown(location, hints, _CUSTOM_FIELDS if custom else _FUNCTION_FIELDS)
    name = echo.get("name")
    if not isinstance(name, str):
        raise InvalidParameter(f"{location}.name", "must be the name of the tool, which this API has beside its type")
    if custom:
        function = _custom_function(location, echo)
    else:
        function = {key: value for key, value in echo.items() if key != "type"}
        echo = {"description": None, "parameters": None, "strict": None} | echo
    described = function.get("description")
    if about and isinstance(described, str | None):
        function["description"] = f"{about}\n\n{described}" if described else about
    return OfferedTool(name, name, namespace, custom, location, function, echo)


def _custom_function(location: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return the function for a custom tool. No grammar applies within a JSON string, so it is only described."""
    form = tool.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    argument: dict[str, Any] = {"type": "string"}
    if kind == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            problem = "must be a grammar with a syntax, lark or regex, and a definition"
            raise InvalidParameter(f"{location}.format", problem)
        ignore(f"{location}.format", "the grammar of a custom tool is shown to the model, but not enforced")
        argument["description"] = f"Must match this {syntax} grammar:\n{definition}"
    elif kind != "text":
        raise InvalidParameter(f"{location}.format.type", "must be text or grammar")
    schema = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT], "additionalProperties": False}
    return {"name": tool["name"], "description": tool.get("description"), "parameters": schema}


def check_encodable(parameter: str, value: Any) -> None:
    """Refuse lone surrogates in what the response repeats, which could not be encoded."""
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError):
        raise InvalidParameter(parameter, "must be JSON of valid Unicode") from None


def _with_unique_names(tools: Sequence[OfferedTool]) -> list[OfferedTool]:
    """Show tools of namespaces with their namespace where another tool has the same name."""
    names = Counter(tool.name for tool in tools)
    return [
        tool
        if tool.namespace is None or names[tool.name] == 1
        else replace(tool, shown=f"{tool.namespace}__{tool.name}")
        for tool in tools
    ]


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the text of a custom tool's input from the JSON of its arguments, as that arrives.

    Arguments of another form, which a model without a grammar may write, are themselves the text.
    """

    _BEGIN = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
    _TEXT = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
    _HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")

    def __init__(self) -> None:
        self._rest = ""  # what is not read yet
        self._inside = False
        self._over = False

    def push(self, json_text: str) -> str:
        """Add JSON text and return the text that it completes."""
        if self._over:
            return ""
        self._rest += json_text
        if not self._inside:
            begin = self._BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._inside, self._rest = True, self._rest[begin.end() :]
        found = self._TEXT.match(self._rest)
        assert found is not None
        text, after = found[0], self._rest[found.end() :]
        self._over = after.startswith('"')
        if not self._over and (half := self._HIGH_SURROGATE.search(text)):
            text, after = text[: half.start()], half[0] + after
        self._rest = after
        return str(json.loads(f'"{text}"', strict=False)).encode("utf-8", "replace").decode("utf-8")

    def close(self) -> str:
        """Return the remaining text."""
        if self._inside:
            return ""  # At most a part of an escape is left.
        try:
            return "" if json.loads(self._rest) == {} else self._rest
        except (ValueError, RecursionError):
            return "" if self._rest.lstrip().startswith("{") else self._rest
