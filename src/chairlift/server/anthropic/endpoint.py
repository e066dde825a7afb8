"""POST /v1/messages: a chat completion with Anthropic's body and response."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.input import MessageInput
from chairlift.server.anthropic.response_builder import MessageBuilder, MessageForm
from chairlift.server.anthropic.types import CountTokensRequest, MessagesRequest
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, TokenizedPrompts, renamed_parameter
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatGeneration
from chairlift.server.served_model import ServedModel

# Prefixes of chat parameters, and this endpoint's names for them.
_NAMES = {
    r"max_(completion_)?tokens": "max_tokens",
    r"stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}


class MessagesGeneration(GenerationRequest):
    id_prefix = "msg_"
    prompt_parameter = "messages"

    def __init__(self, body: MessagesRequest, model: ServedModel, request_id: str) -> None:
        self._body = body
        self._model = model
        self._request_id = request_id
        self._chat = chat_of(body, model)
        super().__init__(body, self._chat.params)
        self._edits: list[dict[str, Any]] | None = None
        self._fills_context = False

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        """Tokenize the prompt. If the context has no room for `max_tokens` of output, the message may fill it."""
        prompt = tokenize_messages(self._body, self._chat, max_tokens)
        self._edits = prompt.edits
        wanted, room = self._body.max_tokens, max(max_tokens - prompt.num_tokens, 1)
        self._fills_context = wanted > room
        return replace(prompt.tokenized, params=prompt.tokenized.params.clone(max_tokens=min(wanted, room)))

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        thinking = self._body.thinking
        form = MessageForm(
            model=self._model.name,
            message_id=response_id,
            request_id=self._request_id,
            limit="model_context_window_exceeded" if self._fills_context else "max_tokens",
            shows_thinking=thinking is None or thinking.display != "omitted",
            edits=self._edits,
        )
        return MessageBuilder(form, self._chat.parser(), usage)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return renamed(error, self._body)


@dataclass(frozen=True, slots=True)
class TokenizedMessages:
    tokenized: TokenizedPrompts
    original_tokens: int  # before the edits of context_management
    edits: list[dict[str, Any]] | None  # what they have changed, if there are any

    @property
    def num_tokens(self) -> int:
        return len(self.tokenized.prompts[0])


def chat_of(body: CountTokensRequest, model: ServedModel) -> ChatGeneration:
    """Return the equivalent chat completion; errors have the names of /v1/messages."""
    try:
        return ChatGeneration(body.as_chat(reasons=model.reasoning_format is not None), model)
    except InvalidParameter as error:
        raise renamed(error, body) from None


def tokenize_messages(body: CountTokensRequest, chat: ChatGeneration, max_tokens: int) -> TokenizedMessages:
    """Tokenize the prompt of /v1/messages; runs in a thread."""
    _ = chat.tools  # validates tools before the messages
    messages = body.messages
    tokenized = _tokenize(messages, body, chat, max_tokens)
    original = len(tokenized.prompts[0])
    if body.context_management is None:
        return TokenizedMessages(tokenized, original, None)
    reports = []
    for edit in body.context_management.edits or ():
        before = len(tokenized.prompts[0])
        if (change := edit.change(messages, before)) is None:
            continue
        edited, report = change
        shorter = _tokenize(edited, body, chat, max_tokens)
        cleared = before - len(shorter.prompts[0])
        if cleared >= edit.least:
            messages, tokenized = edited, shorter
            reports.append(report | {"cleared_input_tokens": cleared})
    return TokenizedMessages(tokenized, original, reports)


def _tokenize(
    messages: list[dict[str, Any]], body: CountTokensRequest, chat: ChatGeneration, max_tokens: int
) -> TokenizedPrompts:
    """Tokenize messages; if the last one is the assistant's, it is continued."""
    given = MessageInput(messages, body.system_text, later_system=chat.shows_later_system)
    try:
        return chat.tokenize_messages(given.messages, max_tokens, continue_final=given.ends_with_assistant)
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
