"""POST /v1/embeddings."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.pooling import Pooling
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat_fields import checked_variables, encode_messages
from chairlift.server.openai.types import check_token_ids
from chairlift.server.pooling.builder import PooledResponseBuilder
from chairlift.server.pooling.types import EmbeddingRequest, check_texts
from chairlift.server.served_model import ServedModel

PROMPTS_AT_ONCE = 128  # of one request; a long list must not fill the queue


class EmbeddingGeneration(GenerationRequest):
    id_prefix = "embd-"
    at_once = PROMPTS_AT_ONCE

    def __init__(self, body: EmbeddingRequest, model: ServedModel) -> None:
        model.embedding.require()
        pooling = Pooling(
            body.pooling or model.embedding.kind, body.dimensions, True if body.normalize is None else body.normalize
        )
        super().__init__(body, SamplingParams(max_tokens=0, pooling=pooling))
        self._body = body
        self._model = model
        self._inputs = body.inputs()
        self.num_prompts = len(self._inputs) or 1
        self.prompt_parameter = "input" if body.messages is None else "messages"

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        if self._body.messages is not None:
            prompt = encode_messages(
                self._model,
                self._body.messages,
                add_generation_prompt=bool(self._body.add_generation_prompt),
                continue_final_message=bool(self._body.continue_final_message),
                max_tokens=max_tokens,
                **checked_variables(self._body.chat_template_kwargs),
            )
            return TokenizedPrompts([prompt], self.params)
        return TokenizedPrompts([self._encode(one, max_tokens) for one in self._inputs], self.params)

    def _encode(self, text: str | list[int], max_tokens: int) -> list[int]:
        if not isinstance(text, str):
            return check_token_ids("input", text)
        check_texts("input", [text])
        return self._model.tokenizer.encode(text, max_tokens=max_tokens)

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> PooledResponseBuilder:
        encoded = self._body.encoding_format == "base64"
        return EmbeddingResponseBuilder(response_id, completion_ids, usage, self._model.name, encoded=encoded)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(self.prompt_parameter) if error.parameter == "prompt" else error


class EmbeddingResponseBuilder(PooledResponseBuilder):
    def __init__(self, response_id: str, completion_ids: list[str], usage: Usage, model: str, *, encoded: bool) -> None:
        super().__init__(response_id, completion_ids, usage, model)
        self._encoded = encoded

    def body(self) -> dict[str, Any]:
        vectors: list[Any] = (
            [b64encode(vector).decode() for vector in self.packed_vectors]
            if self._encoded
            else [vector.tolist() for vector in self.vectors]
        )
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return {**self.head, "object": "list", "data": data, "usage": self.usage_body()}
