"""Conversion of the messages of /v1/messages, which hold content blocks, to chat messages."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.types import CacheControl, TextBlock
from chairlift.server.http.unknown_fields import check_unknown
from chairlift.server.openai.strict import StrictModel, parse_at


class _ToolUse(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None  # of earlier responses: always the model itself


class _ToolResult(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class _Thinking(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _RedactedThinking(StrictModel):
    """Cannot be read, so it is left out."""

    type: Literal["redacted_thinking"]
    data: str


_BLOCKS: dict[str, dict[str, type[StrictModel]]] = {
    "user": {"text": TextBlock, "tool_result": _ToolResult},
    "assistant": {
        "text": TextBlock,
        "tool_use": _ToolUse,
        "thinking": _Thinking,
        "redacted_thinking": _RedactedThinking,
    },
}
_REFUSED = {"image": "this server reads text only", "document": "this server reads text only"}


class MessageInput:
    """Chat messages and the location of each in the request."""

    def __init__(self, given: list[dict[str, Any]], system: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._locations: list[str] = []
        if system is not None:
            self._add("system", {"role": "system", "content": system})
        for index, message in enumerate(given):
            self._add_message(f"messages[{index}]", message)

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the model continues the last message."""
        return bool(self.messages[-1]["role"] == "assistant")

    def location(self, parameter: str) -> str:
        """Return the location in the request of the chat message `messages[2]…`; other names are returned
        unchanged."""
        found = re.match(r"messages\[(\d+)\]", parameter)
        return self._locations[int(found[1])] if found else parameter

    def _add(self, location: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._locations.append(location)

    def _add_message(self, location: str, given: dict[str, Any]) -> None:
        role, content = given.get("role"), given.get("content")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise InvalidParameter(f"{location}.role", f"must be user or assistant, got {str(role)[:40]!r}")
        check_unknown(location, given, ("role", "content"))
        if isinstance(content, str):
            self._add(location, {"role": role, "content": content})
            return
        if not isinstance(content, list) or not content:
            raise InvalidParameter(f"{location}.content", "must be text or a non-empty list of content blocks")
        blocks = [_block(f"{location}.content[{index}]", role, block) for index, block in enumerate(content)]
        (self._add_user if role == "user" else self._add_assistant)(location, blocks)

    def _add_user(self, location: str, blocks: list[StrictModel]) -> None:
        for index, block in enumerate(blocks):
            if isinstance(block, _ToolResult):
                place = f"{location}.content[{index}]"
                text = _result_text(f"{place}.content", block)
                self._add(place, {"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        if texts := [block.text for block in blocks if isinstance(block, TextBlock)]:
            self._add(location, {"role": "user", "content": "\n".join(texts)})

    def _add_assistant(self, location: str, blocks: list[StrictModel]) -> None:
        text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts := [block.thinking for block in blocks if isinstance(block, _Thinking)]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls := [_call(block) for block in blocks if isinstance(block, _ToolUse)]:
            message["tool_calls"] = calls
        self._add(location, message)


def _call(block: _ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _result_text(location: str, result: _ToolResult) -> str:
    content = result.content or ""
    if isinstance(content, str):
        return content
    return "\n".join(_text(f"{location}[{index}]", block) for index, block in enumerate(content))


def _text(location: str, given: dict[str, Any]) -> str:
    block = _block(location, "user", given)
    if not isinstance(block, TextBlock):
        raise InvalidParameter(f"{location}.type", "must be text")
    return block.text


def _block(location: str, role: str, given: Any) -> StrictModel:
    if not isinstance(given, dict):
        raise InvalidParameter(location, f"must be an object with a type, got {type(given).__name__}")
    kind = str(given.get("type"))
    known = f"must be one of {', '.join(_BLOCKS[role])} in a message of the {role}, got {kind[:40]!r}"
    if kind not in _BLOCKS[role]:
        raise InvalidParameter(f"{location}.type", _REFUSED.get(kind, known))
    return parse_at(location, _BLOCKS[role][kind], given)
