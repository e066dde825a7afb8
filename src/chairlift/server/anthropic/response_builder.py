"""Responses of /v1/messages, built from the engine's updates: content blocks, and events about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chairlift.server.anthropic.errors import anthropic_error
from chairlift.server.anthropic.input import tool_input
from chairlift.server.generation.usage import Usage
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantParser,
    AssistantPart,
    CallBegun,
    ContentDelta,
    ReasoningDelta,
)

MessageEvent = dict[str, Any]

# Anthropic's signatures prove that thinking came from its server. This server takes any thinking back, but clients drop
# thinking without a signature.
SIGNATURE = "unsigned"

_json = msgspec.json.Encoder()


@dataclass(slots=True)
class ContentBlock:
    """A block of a response: text, thinking or the use of a tool."""

    start: dict[str, Any]  # The block begins so, without content.
    delta_type: str
    delta_field: str
    pieces: list[str] = field(default_factory=list)

    @classmethod
    def text(cls) -> ContentBlock:
        return cls({"type": "text", "text": ""}, "text_delta", "text")

    @classmethod
    def thinking(cls) -> ContentBlock:
        return cls({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")

    @classmethod
    def tool_use(cls, call: CallBegun) -> ContentBlock:
        start = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        return cls(start, "input_json_delta", "partial_json")

    @property
    def kind(self) -> str:
        return str(self.start["type"])

    def body(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind == "tool_use":
            return self.start | {"input": tool_input(text)}
        return self.start | {self.delta_field: text} | ({"signature": SIGNATURE} if self.kind == "thinking" else {})


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a message has apart from its content."""

    model: str
    message_id: str
    request_id: str
    limit: str  # stop_reason of a message that is cut
    shows_thinking: bool = True
    edits: list[dict[str, Any]] | None = None  # what context_management has cleared


class MessageBuilder:
    """Builds one message. A whole message is built from the events of a stream, which are discarded."""

    def __init__(self, form: MessageForm, parser: AssistantParser, usage: Usage) -> None:
        self.usage = usage
        self._form = form
        self._parser = parser
        self._blocks: list[ContentBlock] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._started = False

    def add(self, update: Update) -> None:
        for _ in self._update_events(update):
            pass

    def body(self) -> dict[str, Any]:
        return self._message([block.body() for block in self._blocks])

    def events(self, update: Update) -> list[bytes]:
        return [_encode(event) for event in (*self._start(), *self._update_events(update))]

    def end_events(self) -> list[bytes]:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        events: list[MessageEvent] = [
            {"type": "message_delta", "delta": delta, "usage": self._usage(), **self._context_management()},
            {"type": "message_stop"},
        ]
        return [_encode(event) for event in events]

    def error_events(self, error: APIError) -> list[bytes]:
        return [_encode(anthropic_error(error.status_code, error.body, self._form.request_id))]

    # ---- events -------------------------------------------------------------------------------------------------

    def _start(self) -> list[MessageEvent]:
        if self._started:
            return []
        self._started = True
        return [{"type": "message_start", "message": self._message([])}]

    def _update_events(self, update: Update) -> Iterator[MessageEvent]:
        for part in self._parser.push(update.text):
            yield from self._part_events(part)
        if update.finish_reason is not None:
            for part in self._parser.close():
                yield from self._part_events(part)
            yield from self._finish(update)

    def _part_events(self, part: AssistantPart) -> Iterator[MessageEvent]:
        match part:
            case ReasoningDelta(text=text):
                yield from self._extend("thinking", text)
            case ContentDelta(text=text):
                yield from self._extend("text", text)
            case CallBegun():
                yield from self._begin(ContentBlock.tool_use(part))
            case ArgumentsDelta(text=text):
                yield from self._delta(text)

    def _extend(self, kind: str, text: str) -> Iterator[MessageEvent]:
        """Add text to the last block, or begin one of this kind."""
        if not self._blocks or self._blocks[-1].kind != kind:
            yield from self._begin(ContentBlock.text() if kind == "text" else ContentBlock.thinking())
        if kind == "text" or self._form.shows_thinking:
            yield from self._delta(text)

    def _delta(self, text: str) -> Iterator[MessageEvent]:
        block = self._blocks[-1]
        block.pieces.append(text)
        delta = {"type": block.delta_type, block.delta_field: text}
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _begin(self, block: ContentBlock) -> Iterator[MessageEvent]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.start}

    def _close(self) -> Iterator[MessageEvent]:
        if not self._blocks:
            return
        index = len(self._blocks) - 1
        if self._blocks[-1].kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _finish(self, update: Update) -> Iterator[MessageEvent]:
        yield from self._close()
        if update.finish_reason == "length":
            self._stop_reason = self._form.limit
        elif isinstance(update.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", update.stop_reason
        else:
            called = any(block.kind == "tool_use" for block in self._blocks)
            self._stop_reason = "tool_use" if called else "end_turn"

    # ---- JSON ---------------------------------------------------------------------------------------------------

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._form.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._form.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
            **self._context_management(),
        }

    def _context_management(self) -> dict[str, Any]:
        return {} if self._form.edits is None else {"context_management": {"applied_edits": self._form.edits}}

    def _usage(self) -> dict[str, Any]:
        """Return the token counts; Anthropic's `input_tokens` are those that were not read from the cache."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _encode(event: MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _json.encode(event))
