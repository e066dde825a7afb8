"""POST /v1/completions."""

from __future__ import annotations

from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.response_builder import CompletionResponseBuilder, Echo, TextChoiceFormat
from chairlift.server.openai.types import CompletionRequest, check_token_ids
from chairlift.server.served_model import ServedModel
from chairlift.text.fill_in_middle import encode_fill_in_middle


class TextGeneration(GenerationRequest):
    id_prefix = "cmpl-"
    prompt_parameter = "prompt"

    def __init__(self, body: CompletionRequest, model: ServedModel) -> None:
        super().__init__(body, body.params(model.sampling), body.max_tokens)
        self._body = body
        self._model = model
        self._prompts = body.prompts()
        self._echoes: list[Echo] = []
        self.num_prompts = len(self._prompts)

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        prompts = [self._encode(prompt, max_tokens) for prompt in self._prompts]
        self._echoes = [
            self._echo(prompt, tokens)
            for prompt, tokens in zip(self._prompts, prompts, strict=True)
            for _ in range(self.params.n)
        ]
        return TokenizedPrompts(prompts, self.params)

    def _encode(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt)
        if self._body.suffix is not None:
            return encode_fill_in_middle(self._model.tokenizer, prompt, self._body.suffix, max_tokens=max_tokens)
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt, max_tokens=max_tokens)
        return prompt

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        if not self._body.echo:
            return Echo()
        text = prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt)
        return Echo(text, tokens[0] if tokens and self._body.logprobs is not None else None)

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        choices = TextChoiceFormat(self._body.logprobs, self._echoes)
        return CompletionResponseBuilder(choices, self._model, self._body, response_id, completion_ids, usage)
