"""The input of /v1/responses, a list of items, as the messages of a chat."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from chairlift.errors import InvalidParameter
from chairlift.server.openai.strict import Strict

_REFUSED_PARTS = {
    "input_image": "this server reads text only",
    "input_file": "this server reads text only",
    "input_audio": "this server reads text only",
}
_REFUSED_ITEMS = {
    "item_reference": "nothing is kept between requests, so send the item itself (clients do so with store: false)",
    "reasoning": "reasoning items are not supported; leave them out",
}


Model = TypeVar("Model", bound=Strict)


class _Item(Strict):
    """Items of earlier answers come back with their labels, which tell the model nothing."""

    type: str | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _Message(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    phase: Literal["commentary", "final_answer"] | None = None


class _FunctionCall(_Item):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutput(_Item):
    call_id: str
    output: Any


class _TextPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # the official client sends back what it made of the text


_KINDS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
}


class Conversation:
    """Messages, and for each of them where in the request it came from."""

    def __init__(self, given: str | list[dict[str, Any]], instructions: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._places: list[list[str]] = []  # of the message, and of each of its tool calls
        self._calls: set[str] = set()
        if instructions is not None:
            self._add("instructions", {"role": "system", "content": instructions})
        if isinstance(given, str):
            self._add("input", {"role": "user", "content": given})
        else:
            for index, item in enumerate(given):
                self._take_in(f"input[{index}]", item)

    def place(self, parameter: str) -> str:
        """What the caller knows `messages[2].tool_calls[0]…` as; other names are left alone."""
        found = re.fullmatch(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\]\.function)?(.*)", parameter, re.DOTALL)
        if found is None:
            return parameter
        message, call, rest = found.groups()
        return self._places[int(message)][0 if call is None else 1 + int(call)] + rest

    def _take_in(self, place: str, given: dict[str, Any]) -> None:
        match _checked_item(place, given):
            case _Message(role=role, content=content):
                # Templates know one word for those who give the model its orders.
                role = "system" if role == "developer" else role
                self._add(place, {"role": role, "content": _text(f"{place}.content", content)})
            case _FunctionCall() as call:
                self._add_call(place, call)
            case _FunctionCallOutput(call_id=call_id, output=output):
                if call_id not in self._calls:
                    raise InvalidParameter(f"{place}.call_id", "has no function_call before it in input")
                text = _text(f"{place}.output", output)
                self._add(place, {"role": "tool", "tool_call_id": call_id, "content": text})

    def _add(self, place: str, message: dict[str, Any]) -> None:
        """Orders at the beginning become one message: few templates have a place for more."""
        if message["role"] == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + message["content"]
            return
        self.messages.append(message)
        self._places.append([place])

    def _add_call(self, place: str, call: _FunctionCall) -> None:
        """Calls belong to the message before them, if it is the assistant's: that is one turn of the model."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(place, {"role": "assistant", "content": ""})
        function = {"name": call.name, "arguments": call.arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "type": "function", "function": function})
        self._places[-1].append(place)
        self._calls.add(call.call_id)


def _checked_item(place: str, given: dict[str, Any]) -> _Item:
    kind = given.get("type")
    if kind is None and "role" in given:
        kind = "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = f"must be one of {', '.join(_KINDS)}, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"{place}.type", _REFUSED_ITEMS.get(str(kind), known))
    return _checked(_KINDS[kind], place, given)


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidParameter(place, "must be text or a non-empty list of text parts")
    return "\n".join(_part(f"{place}[{index}]", part) for index, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidParameter(place, f"must be an object with type and text, got {type(part).__name__}")
    if str(part.get("type")) in _REFUSED_PARTS:
        raise InvalidParameter(f"{place}.type", f"{part['type']}: {_REFUSED_PARTS[part['type']]}")
    return _checked(_TextPart, place, part).text


def _checked(model: type[Model], place: str, given: dict[str, Any]) -> Model:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        problem = "unknown parameter" if first["type"] == "extra_forbidden" else str(first["msg"])
        raise InvalidParameter(place + where, problem) from error
