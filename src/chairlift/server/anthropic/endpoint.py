"""POST /v1/messages: a chat completion with Anthropic's body and response."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.errors import anthropic_error
from chairlift.server.anthropic.input import MessageInput, tool_input
from chairlift.server.anthropic.types import CountTokensRequest, MessagesRequest
from chairlift.server.generation.endpoint import GenerationRequest, Tokenized, renamed_parameter
from chairlift.server.generation.reply import Event, PartsBuilder
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatGeneration, ChatPrompt
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import ArgumentsDelta, AssistantPart, CallBegun, ContentDelta, ReasoningDelta

# Prefixes of chat parameters, and this endpoint's names for them.
_NAMES = {
    r"max_(completion_)?tokens": "max_tokens",
    r"stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}
# Anthropic's signatures prove that thinking came from its server. This server takes any thinking back, but clients drop
# thinking without a signature.
SIGNATURE = "unsigned"


class MessagesGeneration(GenerationRequest):
    id_prefix = "msg_"

    body: MessagesRequest

    def __init__(self, body: MessagesRequest, model: ServedModel, request_id: str) -> None:
        self.request_id = request_id
        self._chat = chat_of(body, model)
        super().__init__(body, model, self._chat.params, streams=bool(body.stream), prompt_parameter="messages")

    def tokenize(self, max_tokens: int) -> Tokenized:
        """Tokenize the prompt. If the context has no room for `max_tokens` of output, the message may fill it."""
        tokenized = tokenize_messages(self.body, self._chat, max_tokens)
        prompt, wanted = tokenized.prompt, self.body.max_tokens
        room = max(max_tokens - len(prompt.tokens), 1)
        limit = "model_context_window_exceeded" if wanted > room else "max_tokens"

        def reply(response_id: str, completion_ids: list[str], usage: Usage) -> MessageBuilder:
            return MessageBuilder(self, tokenized, response_id, usage, limit)

        return Tokenized(
            [prompt.tokens], prompt.params.clone(max_tokens=min(wanted, room)), reply, prompt.reasoning, prompt.images
        )

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return renamed(error, self.body)


@dataclass(frozen=True, slots=True)
class TokenizedMessages:
    prompt: ChatPrompt
    original_tokens: int  # They are counted before the edits of context_management.
    edits: list[dict[str, Any]] | None  # what they have changed, if there are any


def chat_of(body: CountTokensRequest, model: ServedModel) -> ChatGeneration:
    """Return the equivalent chat completion; errors have the names of /v1/messages."""
    try:
        chat = body.as_chat(reasons=model.reasoning_format is not None)
        return ChatGeneration(chat, model, chat.params(model))
    except InvalidParameter as error:
        raise renamed(error, body) from None


def tokenize_messages(body: CountTokensRequest, chat: ChatGeneration, max_tokens: int) -> TokenizedMessages:
    """Tokenize the prompt of /v1/messages; runs in a thread."""
    _ = chat.tools  # validates tools before the messages
    messages = body.messages
    prompt = _tokenize(messages, body, chat, max_tokens)
    original = len(prompt.tokens)
    if body.context_management is None:
        return TokenizedMessages(prompt, original, None)
    reports = []
    for edit in body.context_management.edits or ():
        before = len(prompt.tokens)
        if (change := edit.change(messages, before)) is None:
            continue
        edited, report = change
        shorter = _tokenize(edited, body, chat, max_tokens)
        cleared = before - len(shorter.tokens)
        if cleared >= edit.least:
            messages, prompt = edited, shorter
            reports.append(report | {"cleared_input_tokens": cleared})
    return TokenizedMessages(prompt, original, reports)


def _tokenize(
    messages: list[dict[str, Any]], body: CountTokensRequest, chat: ChatGeneration, max_tokens: int
) -> ChatPrompt:
    """Tokenize messages; if the last one is the assistant's, it is continued."""
    later_system = chat.model.tokenizer.template_shows_later_system
    given = MessageInput(messages, body.system_text, later_system=later_system)
    try:
        return chat.encode(given.messages, max_tokens, continue_final=given.ends_with_assistant)
    except InvalidParameter as error:
        raise error.renamed(given.location(error.parameter)) from None


def renamed(error: InvalidParameter, body: CountTokensRequest) -> InvalidParameter:
    names = _NAMES | {"reasoning_effort": body.reasoning_parameter}
    return error.renamed(renamed_parameter(error.parameter, names))


def model_info(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """Return Anthropic's description of a model."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def model_page(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return Anthropic's list of all models."""
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}


# ---- responses: content blocks, and events about them ----------------------------------------------------------------


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


class MessageBuilder(PartsBuilder):
    """Builds one message of content blocks."""

    def __init__(
        self, request: MessagesGeneration, tokenized: TokenizedMessages, message_id: str, usage: Usage, limit: str
    ) -> None:
        """`limit` is the stop_reason of a message that is cut."""
        super().__init__(tokenized.prompt.parser(), usage)
        thinking, edits = request.body.thinking, tokenized.edits
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": request.model.name}
        self._request_id = request.request_id
        self._limit = limit
        self._shows_thinking = thinking is None or thinking.display != "omitted"
        self._edits = {} if edits is None else {"context_management": {"applied_edits": edits}}
        self._blocks: list[ContentBlock] = []
        self._ending: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def body(self) -> dict[str, Any]:
        return self._message([block.body() for block in self._blocks])

    def end_events(self) -> list[bytes]:
        delta = {"type": "message_delta", "delta": self._ending, "usage": self._usage(), **self._edits}
        return [self.encode(delta), self.encode({"type": "message_stop"})]

    def error_events(self, error: APIError) -> list[bytes]:
        return [self.encode(anthropic_error(error.status_code, error.body, self._request_id))]

    def first_events(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message([])}]

    def part_events(self, part: AssistantPart) -> Iterator[Event]:
        match part:
            case ReasoningDelta(text=text):
                yield from self._extend("thinking", text)
            case ContentDelta(text=text):
                yield from self._extend("text", text)
            case CallBegun():
                yield from self._begin(ContentBlock.tool_use(part))
            case ArgumentsDelta(text=text):
                yield self._delta(text)

    def last_events(self, update: Update) -> Iterator[Event]:
        yield from self._close()
        called = any(block.kind == "tool_use" for block in self._blocks)
        self._ending["stop_reason"] = "tool_use" if called else "end_turn"
        if update.finish_reason == "length":
            self._ending["stop_reason"] = self._limit
        elif isinstance(update.stop_reason, str):
            self._ending = {"stop_reason": "stop_sequence", "stop_sequence": update.stop_reason}

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        """Add text to the last block, or begin one of this kind."""
        if not self._blocks or self._blocks[-1].kind != kind:
            yield from self._begin(ContentBlock.text() if kind == "text" else ContentBlock.thinking())
        if kind == "text" or self._shows_thinking:
            yield self._delta(text)

    def _delta(self, text: str) -> Event:
        block = self._blocks[-1]
        block.pieces.append(text)
        delta = {"type": block.delta_type, block.delta_field: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _begin(self, block: ContentBlock) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.start}

    def _close(self) -> Iterator[Event]:
        if not self._blocks:
            return
        index = len(self._blocks) - 1
        if self._blocks[-1].kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "content": content, **self._ending, "usage": self._usage(), **self._edits}

    def _usage(self) -> dict[str, Any]:
        """Return the token counts; Anthropic's `input_tokens` are those that were not read from the cache."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
