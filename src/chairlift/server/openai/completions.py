"""POST /v1/completions."""

from __future__ import annotations

from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.response_builder import CompletionResponseBuilder, TextChoiceFormat
from chairlift.server.openai.types import CompletionRequest, check_token_ids
from chairlift.server.served_model import ServedModel


class TextGeneration(GenerationRequest):
    id_prefix = "cmpl-"
    prompt_parameter = "prompt"

    def __init__(self, body: CompletionRequest, model: ServedModel) -> None:
        super().__init__(body, body.params())
        self._body = body
        self._model = model
        self._prompts = body.prompts()
        self._echoes: list[str] = []
        self.num_prompts = len(self._prompts)

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        prompts = [self._encode(prompt, max_tokens) for prompt in self._prompts]
        self._echoes = [self._echo(prompt) for prompt in self._prompts for _ in range(self.params.n)]
        return TokenizedPrompts(prompts, self.params)

    def _encode(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt, max_tokens=max_tokens)
        return check_token_ids("prompt", prompt)

    def _echo(self, prompt: str | list[int]) -> str:
        if not self._body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt)

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        choices = TextChoiceFormat(self._body.logprobs is not None, self._echoes)
        return CompletionResponseBuilder(choices, self._model, self._body, response_id, completion_ids, usage)
