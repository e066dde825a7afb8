"""Check the messages of a conversation and normalise them to the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from chairlift.errors import InvalidParameter

MAX_DEPTH = 32
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_COMPLETED = 200_000  # characters of arguments that were cut off
MAX_VALUES = 100_000  # The limit of a message or a template variable.
MAX_NAME = 100  # characters of a key in an error
_TEXT_PARTS = ("text", "input_text", "output_text")  # The last two are those of the Responses API.
# The beginning of an entry of an object or a list, such as `, "key": tr`.
_STRING = r'"(?:[^"\\]|\\.)*+\\?'
_INCOMPLETE_ENTRY = re.compile(rf'(?s),?\s*(?:{_STRING}(?:"\s*(?::\s*(?:{_STRING}|[-+.\w]*))?)?|[-+.\w]*)\s*')


class CallArguments(dict[str, Any]):
    """The arguments of a call, for templates that read them as an object and for those that join them as JSON text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return f"{self}{after}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


def checked_messages(messages: Any, named: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Return validated copies of messages with text content. Errors name the path, such as `messages[2].content`.

    With `named`, roles that are neither OpenAI's nor `named` in the chat template are refused, and the role `developer`
    becomes `system` unless the template has it.
    """
    if named is not None:
        messages = _known_roles(messages, named)
    if not _is_list(messages) or not messages:
        raise InvalidParameter("messages", "must be a non-empty list of messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _known_roles(messages: Sequence[Mapping[str, Any]], named: Collection[str]) -> Sequence[Mapping[str, Any]]:
    for i, message in enumerate(messages):
        role = message.get("role")
        if isinstance(role, str) and role not in ROLES and role not in named:
            raise InvalidParameter(f"messages[{i}].role", f"must be one of {', '.join(ROLES)}, got {role[:40]!r}")
    if "developer" in named:
        return messages
    return [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter(name, f"must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameter(f"{name}.role", f"must be a name such as 'user', got {role!r}")
    # Drop nulls: templates test whether a key exists.
    checked = {key: item for key, item in plain_data(name, message).items() if item is not None}
    calls = checked.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _tool_calls(f"{name}.tool_calls", calls)
        if not calls:
            del checked["tool_calls"]
    content = message.get("content")
    if role == "assistant":
        refusal = checked.pop("refusal", None)  # a field of responses, which no template reads
        if content is None and not calls:
            content = refusal if isinstance(refusal, str) else ""
    checked["content"] = _text(f"{name}.content", content, role, optional=bool(calls))
    return checked


def _text(name: str, content: Any, role: str, *, optional: bool) -> str | None:
    if isinstance(content, str):
        return str(content)
    if content is None and optional:
        return None
    if not _is_list(content):
        raise InvalidParameter(name, f"must be text or a list of text parts, got {type(content).__name__}")
    return "\n".join(_part(f"{name}[{i}]", part, role) for i, part in enumerate(content))


def _part(name: str, part: Any, role: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS and (kind != "refusal" or role != "assistant"):
        problem = f"only parts of type 'text' are supported, got {kind!r}"
        raise InvalidParameter(name, f"{problem}: this server reads text only")
    key = "text" if kind in _TEXT_PARTS else kind
    if not isinstance(part.get(key), str):
        raise InvalidParameter(f"{name}.{key}", "must be a string")
    return str(part[key])


def _tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with parsed arguments; clients send the JSON text that the model generated."""
    if not _is_list(calls) or not all(isinstance(call, dict) for call in calls):
        raise InvalidParameter(name, "must be a list of objects")
    for i, call in enumerate(calls):
        function = call.get("function")
        path = f"{name}[{i}].function.arguments"
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = _arguments(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                problem = f"must be JSON text or an object: {error}"
                raise InvalidParameter(path, problem) from error
            if not isinstance(arguments, dict):
                raise InvalidParameter(path, "must be JSON text of an object")
            function["arguments"] = plain_data(path, arguments)
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = CallArguments(function["arguments"])
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"{name}[{i}].function", "must be an object with a name")
    return list(calls)


def _arguments(text: str) -> Any:
    """Parse arguments. Those of a call that was cut off, by max_tokens for example, are completed."""
    try:
        return json.loads(text)
    except ValueError:
        for completed in _completions(text) if len(text) <= MAX_COMPLETED else ():
            with suppress(ValueError):
                return json.loads(completed)
        raise


def _completions(text: str) -> Iterator[str]:
    """Close what is open at the end of a JSON text; then the same without its last entry if that is incomplete."""
    end, last_entry = _end_of(text)
    if end:
        yield text + end
        if _INCOMPLETE_ENTRY.fullmatch(text, last_entry):
            yield text[:last_entry] + _end_of(text[:last_entry])[0]


def _end_of(text: str) -> tuple[str, int]:
    """Return what closes the strings, objects and lists that are open, and where the last entry of one begins."""
    closers: list[str] = []
    in_string = escaped = False
    last_entry = 0
    for place, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            last_entry = place + 1
        elif character in "}]" and closers:
            closers.pop()
        elif character == ",":
            last_entry = place
    return '"' * in_string + "".join(reversed(closers)), last_entry


def plain_data(name: str, value: Any, depth: int = 0) -> Any:
    """Return a deep copy of JSON types, so that a template gets neither methods nor the caller's objects."""
    if depth == 0:
        name = name[:MAX_NAME]
        _check_size(name, value)
    if depth > MAX_DEPTH:
        raise InvalidParameter(name, f"is nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        # A name of megabytes would be copied for each of the values in it.
        return {str(key): plain_data(f"{name}.{str(key)[:MAX_NAME]}", item, depth + 1) for key, item in value.items()}
    if _is_list(value):
        return [plain_data(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise InvalidParameter(name, f"must be made of JSON values, got {type(value).__name__}")


def _check_size(name: str, value: Any) -> None:
    """Limit the number of values: a short text can contain millions of empty lists."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH + 1):  # plain_data refuses deeper nesting
        level = [child for one in level for child in _children(one)]
        count += len(level)
        if count > MAX_VALUES:
            raise InvalidParameter(name, f"is made of more than {MAX_VALUES} values")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if _is_list(value) else ()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
