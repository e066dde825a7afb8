"""POST /v1/messages: a chat completion with Anthropic's body and response."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.input import MessageInput
from chairlift.server.anthropic.response_builder import MessageBuilder
from chairlift.server.anthropic.types import CountTokensRequest, MessagesRequest
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatGeneration
from chairlift.server.openai.strict import renamed_parameter
from chairlift.server.openai.types import ChatRequest
from chairlift.server.served_model import ServedModel

# Prefixes of chat parameters, and this endpoint's names for them.
_NAMES = {
    r"max_(completion_)?tokens": "max_tokens",
    r"stop": "stop_sequences",
    r"reasoning_effort": "thinking",
    r"response_format(\.json_schema)?": "output_config.format",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}


class MessagesGeneration(GenerationRequest):
    id_prefix = "msg_"
    prompt_parameter = "messages"

    def __init__(self, body: MessagesRequest, model: ServedModel) -> None:
        self._chat = chat_of(body.chat, model)
        super().__init__(body, self._chat.params, body.max_tokens)
        self._body = body
        self._model = model

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        return tokenize_messages(self._body, self._chat, max_tokens)

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        return MessageBuilder(self._model.name, self._chat.parser(), response_id, usage)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return renamed(error)


def chat_of(as_chat: Callable[[], ChatRequest], model: ServedModel) -> ChatGeneration:
    """Return the equivalent chat completion; errors have the names of /v1/messages."""
    try:
        return ChatGeneration(as_chat(), model)
    except InvalidParameter as error:
        raise renamed(error) from None


def tokenize_messages(body: CountTokensRequest, chat: ChatGeneration, max_tokens: int) -> TokenizedPrompts:
    """Tokenize the prompt of /v1/messages; runs in a thread. If the last message is the assistant's, it is
    continued."""
    _ = chat.tools  # validates tools before the messages
    given = MessageInput(body.messages, body.system_text)
    try:
        return chat.tokenize_messages(given.messages, max_tokens, continue_final=given.ends_with_assistant)
    except InvalidParameter as error:
        raise error.renamed(given.location(error.parameter)) from None


def renamed(error: InvalidParameter) -> InvalidParameter:
    return error.renamed(renamed_parameter(error.parameter, _NAMES))
