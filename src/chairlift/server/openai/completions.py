"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from chairlift.server.generation.endpoint import GenerationRequest, Tokenized
from chairlift.server.openai.response_builder import CompletionResponseBuilder, Echo, TextChoiceFormat
from chairlift.server.openai.types import CompletionRequest, check_token_ids
from chairlift.server.served_model import ServedModel
from chairlift.text.fill_in_middle import encode_fill_in_middle


class TextGeneration(GenerationRequest):
    id_prefix = "cmpl-"

    body: CompletionRequest

    def __init__(self, body: CompletionRequest, model: ServedModel) -> None:
        params, self._prompts = body.params(model.sampling), body.prompts()
        super().__init__(
            body, model, params, body.max_tokens, streams=bool(body.stream), num_prompts=len(self._prompts)
        )

    def tokenize(self, max_tokens: int) -> Tokenized:
        prompts = [self._encode(prompt, max_tokens) for prompt in self._prompts]
        echoes = [
            self._echo(prompt, tokens)
            for prompt, tokens in zip(self._prompts, prompts, strict=True)
            for _ in range(self.params.n)
        ]
        choices = TextChoiceFormat(self.body.logprobs, echoes)
        return Tokenized(prompts, self.params, partial(CompletionResponseBuilder, choices, self.model, self.body))

    def _encode(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt)
        if self.body.suffix is not None:
            return encode_fill_in_middle(self.model.tokenizer, prompt, self.body.suffix, max_tokens=max_tokens)
        if isinstance(prompt, str):
            return self.model.tokenizer.encode(prompt, max_tokens=max_tokens)
        return prompt

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        if not self.body.echo:
            return Echo()
        text = prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt)
        return Echo(text, tokens[0] if tokens and self.body.logprobs is not None else None)
