"""Conversion of the input of /v1/responses, a list of items, to chat messages."""

from __future__ import annotations

import re
from typing import Any, Literal

from chairlift.errors import InvalidParameter
from chairlift.server.openai.strict import StrictModel, parse_at

_REFUSED_PARTS = {
    "input_image": "this server reads text only",
    "input_file": "this server reads text only",
    "input_audio": "this server reads text only",
}
_REFUSED_ITEMS = {
    "item_reference": "nothing is kept between requests, so send the item itself (clients do so with store: false)",
}


class _Item(StrictModel):
    """Fields of every item. Ids and statuses, which clients send back from earlier responses, are ignored."""

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


class _ReasoningPart(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _FunctionCallOutput(_Item):
    call_id: str
    output: Any


class _Reasoning(_Item):
    """Reasoning of an earlier response. A summary is read if there is no text; encrypted content cannot be read."""

    content: list[_ReasoningPart] | None = None
    summary: list[_ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or [])


class _TextPart(StrictModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # added by the official client


_KINDS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
    "reasoning": _Reasoning,
}


class InputMessages:
    """Chat messages and the location of each in the request."""

    def __init__(self, given: str | list[dict[str, Any]], instructions: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._locations: list[list[str]] = []  # of a message, then of its tool calls
        self._call_ids: set[str] = set()
        self._reasoning = ""  # of the assistant message that follows
        if instructions is not None:
            self._add("instructions", {"role": "system", "content": instructions})
        if isinstance(given, str):
            self._add("input", {"role": "user", "content": given})
        else:
            for index, item in enumerate(given):
                self._add_item(f"input[{index}]", item)

    def location(self, parameter: str) -> str:
        """Return the location in the input of `messages[2].tool_calls[0]…`; other names are returned unchanged."""
        found = re.fullmatch(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\]\.function)?(.*)", parameter, re.DOTALL)
        if found is None:
            return parameter
        message, call, rest = found.groups()
        return self._locations[int(message)][0 if call is None else 1 + int(call)] + rest

    def _add_item(self, location: str, given: dict[str, Any]) -> None:
        match _parse_item(location, given):
            case _Message(role=role, content=content):
                # Chat templates have no role "developer".
                role = "system" if role == "developer" else role
                message = {"role": role, "content": _text(f"{location}.content", content)}
                self._add(location, message | self._take_reasoning(role))
            case _Reasoning(text=text):
                self._reasoning = "\n\n".join(filter(None, (self._reasoning, text)))
            case _FunctionCall() as call:
                self._add_call(location, call)
            case _FunctionCallOutput(call_id=call_id, output=output):
                if call_id not in self._call_ids:
                    raise InvalidParameter(f"{location}.call_id", "has no function_call before it in input")
                text = _text(f"{location}.output", output)
                self._add(location, {"role": "tool", "tool_call_id": call_id, "content": text})

    def _add(self, location: str, message: dict[str, Any]) -> None:
        """Append a message. Leading system messages are merged, since few templates accept more than one."""
        if message["role"] == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + message["content"]
            return
        self.messages.append(message)
        self._locations.append([location])

    def _take_reasoning(self, role: str) -> dict[str, str]:
        """Return the field for reasoning items before an assistant message, which belong to it."""
        if role != "assistant" or not self._reasoning:
            return {}
        reasoning, self._reasoning = self._reasoning, ""
        return {"reasoning_content": reasoning}

    def _add_call(self, location: str, call: _FunctionCall) -> None:
        """Add a call to the assistant message before it, since both are one turn of the model."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(location, {"role": "assistant", "content": "", **self._take_reasoning("assistant")})
        function = {"name": call.name, "arguments": call.arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "type": "function", "function": function})
        self._locations[-1].append(location)
        self._call_ids.add(call.call_id)


def _parse_item(location: str, given: dict[str, Any]) -> _Item:
    kind = given.get("type")
    if kind is None and "role" in given:
        kind = "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = f"must be one of {', '.join(_KINDS)}, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"{location}.type", _REFUSED_ITEMS.get(str(kind), known))
    return parse_at(location, _KINDS[kind], given)


def _text(location: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidParameter(location, "must be text or a non-empty list of text parts")
    return "\n".join(_part(f"{location}[{index}]", part) for index, part in enumerate(content))


def _part(location: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidParameter(location, f"must be an object with type and text, got {type(part).__name__}")
    if str(part.get("type")) in _REFUSED_PARTS:
        raise InvalidParameter(f"{location}.type", f"{part['type']}: {_REFUSED_PARTS[part['type']]}")
    return parse_at(location, _TextPart, part).text
