"""Conversion of the messages of /v1/messages, which hold content blocks, to chat messages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.types import CacheControl, TextBlock
from chairlift.server.generation.endpoint import Entries, StrictModel, parse_at
from chairlift.server.wire.unknown_fields import check_unknown
from chairlift.text.images import anthropic_url, image_mark


class _ToolUse(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str | None = None  # It is a text if the call was cut: some clients keep that as it is.
    cache_control: CacheControl | None = None
    caller: Any = None  # Earlier responses have it: it is always the model itself.
    toolset_name: str | None = None


class _ToolResult(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Entries[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


class _ToolReference(StrictModel):
    """The name of a tool that a search has found; the tool itself is in `tools`."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} can be used now."


class _Citations(StrictModel):
    enabled: Literal[False] | None = None


class _SearchResult(StrictModel):
    type: Literal["search_result"]
    source: str
    title: str
    content: Entries[TextBlock]
    citations: _Citations | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class _TextSource(StrictModel):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class _Document(StrictModel):
    type: Literal["document"]
    source: _TextSource
    title: str | None = None
    context: str | None = None
    citations: _Citations | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class _Thinking(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _RedactedThinking(StrictModel):
    """Cannot be read, so it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class _SystemMessage(StrictModel):
    """A message of the system in mid-conversation, apart from its content."""

    role: Literal["system"]
    content: Any = None
    clear_at: Literal["next_user_message", "never"] | None = None


class _ImageBlock(StrictModel):
    type: Literal["image"]
    source: dict[str, Any]
    cache_control: Any = None
    text: str = ""  # its mark, once its source is checked


_READABLE = TextBlock | _ImageBlock | _SearchResult | _Document | _ToolReference  # these have `text`


_TEXTS: dict[str, type[StrictModel]] = {
    "text": TextBlock,
    "image": _ImageBlock,
    "search_result": _SearchResult,
    "document": _Document,
}
_BLOCKS: dict[str, dict[str, type[StrictModel]]] = {
    "user": {**_TEXTS, "tool_result": _ToolResult},
    "assistant": {
        "text": TextBlock,
        "tool_use": _ToolUse,
        "thinking": _Thinking,
        "redacted_thinking": _RedactedThinking,
    },
    "system": {"text": TextBlock},
    "tool result": {**_TEXTS, "tool_reference": _ToolReference},
}
_REFUSED = {"document": "this server reads text only"}


@dataclass(slots=True)
class _Turn:
    """A chat message, made of all messages of one role that follow each other."""

    location: str
    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None  # The message is the result of this call.

    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, "content": "\n".join(text for text in self.texts if text)}
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        if thoughts := "\n".join(thought for thought in self.thoughts if thought):
            found["reasoning_content"] = thoughts
        if self.calls:
            found["tool_calls"] = self.calls
        return found


class MessageInput:
    """Chat messages and the location of each in the request."""

    def __init__(self, given: list[dict[str, Any]], system: str | None = None, *, later_system: bool = True) -> None:
        """Without `later_system`, what the system says in mid-conversation becomes a part of what the model reads
        before it: for templates that would not show it."""
        self._turns: list[_Turn] = []
        self._later_system = later_system
        if system is not None:
            self._turn("system", "system").texts.append(system)
        last_user = max((index for index, message in enumerate(given) if message.get("role") == "user"), default=-1)
        for index, message in enumerate(given):
            self._add_message(f"messages[{index}]", message, before_user=index < last_user)
        self.messages = [turn.message() for turn in self._turns]

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the model continues the last message."""
        last = self.messages[-1] if self.messages else {"role": None}
        return last["role"] == "assistant" and "tool_calls" not in last

    def location(self, parameter: str) -> str:
        """Return the location in the request of the chat message `messages[2]…`; other names are returned
        unchanged."""
        found = re.match(r"messages\[(\d+)\]", parameter)
        return self._turns[int(found[1])].location if found else parameter

    def _turn(self, location: str, role: str) -> _Turn:
        """Return the last turn if it has this role, else a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(location, role))
        return self._turns[-1]

    def _add_message(self, location: str, given: dict[str, Any], *, before_user: bool) -> None:
        role, content = given.get("role"), given.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidParameter(f"{location}.role", f"must be user, assistant or system, got {str(role)[:40]!r}")
        if role == "system":
            given_system = parse_at(location, _SystemMessage, given)
        else:
            check_unknown(location, given, ("role", "content"))
        if isinstance(content, str):
            blocks: list[StrictModel] = [TextBlock(type="text", text=content)]
        elif not isinstance(content, list) or (not content and role != "assistant"):
            raise InvalidParameter(f"{location}.content", "must be text or a non-empty list of content blocks")
        else:
            blocks = [_block(f"{location}.content[{index}]", role, block) for index, block in enumerate(content)]
        if role == "user":
            self._add_user(location, blocks)
        elif role == "assistant":
            self._add_assistant(location, blocks)
        elif given_system.clear_at != "next_user_message" or not before_user:
            self._add_system(location, _joined(blocks, TextBlock))

    def _add_user(self, location: str, blocks: list[StrictModel]) -> None:
        for index, block in enumerate(blocks):
            if isinstance(block, _ToolResult):
                place = f"{location}.content[{index}]"
                text = _result_text(f"{place}.content", block)
                self._turns.append(_Turn(place, "tool", [text], call_id=block.tool_use_id))
        if not all(isinstance(block, _ToolResult) for block in blocks):
            self._turn(location, "user").texts.append(_joined(blocks, _READABLE))

    def _add_assistant(self, location: str, blocks: list[StrictModel]) -> None:
        text = _joined(blocks, TextBlock)
        thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
        calls = [_call(block) for block in blocks if isinstance(block, _ToolUse)]
        if text or calls or any(thoughts):  # a model that ended its turn at once has said nothing
            turn = self._turn(location, "assistant")
            turn.texts.append(text)
            turn.thoughts += thoughts
            turn.calls += calls

    def _add_system(self, location: str, text: str) -> None:
        if self._later_system or all(turn.role == "system" for turn in self._turns):
            self._turn(location, "system").texts.append(text)
            return
        text = f"<system>\n{text}\n</system>"
        # A turn of its own behind a tool's result would break the alternation of roles.
        turn = self._turns[-1] if self._turns[-1].role == "tool" else self._turn(location, "user")
        turn.texts.append(text)


def _joined(blocks: list[StrictModel], kind: Any) -> str:
    """Join the texts of the blocks of a kind; empty ones say nothing."""
    return "\n".join(block.text for block in blocks if isinstance(block, kind) and block.text)


def _call(block: _ToolUse) -> dict[str, Any]:
    given = tool_input(block.input) if isinstance(block.input, str) else block.input or {}
    function = {"name": block.name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def tool_input(text: str) -> dict[str, Any]:
    """Parse the input of a tool; text that is not a JSON object, which only a cut call has, is passed on as such."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"_invalid_json": text}


def _result_text(location: str, result: _ToolResult) -> str:
    text = result.content or ""
    if not isinstance(text, str):
        blocks = [_block(f"{location}[{index}]", "tool result", block) for index, block in enumerate(text)]
        text = _joined(blocks, _READABLE)
    return f"Error: {text}" if result.is_error else text


def _block(location: str, owner: str, given: Any) -> StrictModel:
    """Parse a content block of a message of this role, or of a tool result."""
    if not isinstance(given, dict):
        raise InvalidParameter(location, f"must be an object with a type, got {type(given).__name__}")
    kind = str(given.get("type"))
    if kind == "document" and isinstance(given.get("source"), dict) and given["source"].get("type") != "text":
        raise InvalidParameter(f"{location}.source.type", "must be text: this server reads text only")
    known = f"must be one of {', '.join(_BLOCKS[owner])} in a message of the {owner}, got {kind[:40]!r}"
    if kind not in _BLOCKS[owner]:
        raise InvalidParameter(f"{location}.type", _REFUSED.get(kind, known))
    block = parse_at(location, _BLOCKS[owner][kind], given)
    if isinstance(block, _ImageBlock):
        block.text = image_mark(location, anthropic_url(f"{location}.source", block.source))
    return block
