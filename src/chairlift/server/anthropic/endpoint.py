"""POST /v1/messages: a chat completion with Anthropic's body and response."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.input import MessageInput
from chairlift.server.anthropic.response_builder import MessageBuilder, MessageForm
from chairlift.server.anthropic.types import CountTokensRequest, MessagesRequest
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, Tokenized, renamed_parameter
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatGeneration, ChatPrompt
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

    body: MessagesRequest

    def __init__(self, body: MessagesRequest, model: ServedModel, request_id: str) -> None:
        self._request_id = request_id
        self._chat = chat_of(body, model)
        super().__init__(body, model, self._chat.params, streams=bool(body.stream), prompt_parameter="messages")

    def tokenize(self, max_tokens: int) -> Tokenized:
        """Tokenize the prompt. If the context has no room for `max_tokens` of output, the message may fill it."""
        tokenized = tokenize_messages(self.body, self._chat, max_tokens)
        prompt, thinking = tokenized.prompt, self.body.thinking
        wanted, room = self.body.max_tokens, max(max_tokens - len(prompt.tokens), 1)

        def reply(response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
            form = MessageForm(
                model=self.model.name,
                message_id=response_id,
                request_id=self._request_id,
                limit="model_context_window_exceeded" if wanted > room else "max_tokens",
                shows_thinking=thinking is None or thinking.display != "omitted",
                edits=tokenized.edits,
            )
            return MessageBuilder(form, prompt.parser(), usage)

        params = prompt.params.clone(max_tokens=min(wanted, room))
        return Tokenized([prompt.tokens], params, reply, prompt.reasoning)

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
