"""POST /v1/responses: a chat completion with another body and another response."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, Tokenized, renamed_parameter
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatGeneration, ChatPrompt
from chairlift.server.responses.input import InputMessages
from chairlift.server.responses.response_builder import ResponseObjectBuilder
from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.unknown_fields import say_ignored

# Prefixes of chat parameters, and this endpoint's names for them.
_NAMES = {
    r"max_(completion_)?tokens": "max_output_tokens",
    r"logprobs": "top_logprobs",
    r"reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"messages|prompt": "input",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}


class ResponsesGeneration(GenerationRequest):
    id_prefix = "resp_"

    body: ResponsesRequest

    def __init__(self, body: ResponsesRequest, model: ServedModel) -> None:
        body.check()
        self._tools = body.offered_tools
        for parameter in self._without_effect(body, model):
            say_ignored(parameter)
        try:
            chat = body.as_chat(model.tokenizer.template_reads)
            self._chat = ChatGeneration(chat, model, chat.params(model))
        except InvalidParameter as error:
            raise self.rename_error(error) from None
        super().__init__(
            body,
            model,
            self._chat.params,
            body.max_output_tokens,
            streams=bool(body.stream),
            prompt_parameter="input",
        )

    @staticmethod
    def _without_effect(body: ResponsesRequest, model: ServedModel) -> Iterator[str]:
        """Yield the documented parameters that have no effect with the values that they have."""
        if body.effort not in (None, "none") and model.reasoning_format is None:
            yield "reasoning.effort"
        if body.verbosity not in (None, "medium") and "verbosity" not in model.tokenizer.template_reads:
            yield "text.verbosity"
        if body.reasoning is not None and body.reasoning.summary in ("concise", "detailed"):
            yield "reasoning.summary"
        if body.stream_options is not None and body.stream_options.include_obfuscation:
            yield "stream_options.include_obfuscation"
        if body.context_management:
            yield "context_management"

    def tokenize(self, max_tokens: int) -> Tokenized:
        prompt = self._prompt(max_tokens)

        def reply(response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
            assert len(completion_ids) == 1  # this endpoint has no `n`
            return ResponseObjectBuilder(self.body, self.params, self.model, prompt.parser(), response_id, usage)

        return Tokenized([prompt.tokens], prompt.params, reply, prompt.reasoning)

    def _prompt(self, max_tokens: int) -> ChatPrompt:
        _ = self._chat.tools  # validates tools before the input
        messages = InputMessages(self.body.input, self.body.instructions, self._tools)
        if self.body.truncation == "auto":
            prompt = self._prompt_if_fitting(messages, 0, max_tokens)
            if prompt is not None:
                return prompt
            self._shorten(messages, max_tokens)
        try:
            return self._chat.encode(messages.messages, max_tokens)
        except InvalidParameter as error:
            raise error.renamed(messages.location(error.parameter)) from None

    def _shorten(self, messages: InputMessages, max_tokens: int) -> None:
        """Drop as few of the first messages as needed for prompt and output to fit, and as many as possible if
        nothing is enough."""
        cuts = messages.cuts()
        if cuts:
            fits = partial(self._prompt_if_fitting, messages, max_tokens=max_tokens)
            messages.drop_before(cuts[bisect_left(cuts[:-1], True, key=lambda cut: fits(cut) is not None)])

    def _prompt_if_fitting(self, messages: InputMessages, cut: int, max_tokens: int) -> ChatPrompt | None:
        try:
            prompt = self._chat.encode(messages.kept(cut), max_tokens)
        except InvalidParameter as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                return None
            raise error.renamed(messages.location(error.parameter)) from None
        room = max_tokens - (self.body.max_output_tokens or 1)
        return prompt if len(prompt.tokens) <= room else None

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        located = self._tools.rename_error(error)
        return located.renamed(renamed_parameter(located.parameter, _NAMES))
