"""POST /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import time
from abc import abstractmethod
from array import array
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

from chairlift.core.sampling.params import Pooling, SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, Tokenized
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import checked_variables, encode_messages
from chairlift.server.openai.types import check_token_ids
from chairlift.server.pooling.types import EmbeddingRequest, RerankRequest, ScoreRequest, check_texts
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.relevance import Pair, PairScoring, make_pair_scoring, pair_up


class PooledResponseBuilder(ResponseBuilder):
    """The response to a request whose prompts become vectors; it is never streamed."""

    def __init__(self, response_id: str, completion_ids: Sequence[str], usage: Usage, model: str) -> None:
        self.usage = usage
        self.head = {"id": response_id, "created": int(time.time()), "model": model}
        self._vectors = dict.fromkeys(completion_ids, b"")

    def add(self, update: Update) -> None:
        self._vectors[update.request_id] += update.vector

    @property
    def packed_vectors(self) -> list[bytes]:
        """The vectors of all prompts as float32."""
        return list(self._vectors.values())

    @property
    def vectors(self) -> list[array[float]]:
        return [array("f", vector) for vector in self._vectors.values()]

    def usage_body(self) -> dict[str, Any]:
        return {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.prompt_tokens}

    @abstractmethod
    def body(self) -> Any: ...

    def events(self, update: Update) -> list[bytes]:
        raise NotImplementedError

    def end_events(self) -> list[bytes]:
        raise NotImplementedError

    def error_events(self, error: APIError) -> list[bytes]:
        raise NotImplementedError


PROMPTS_AT_ONCE = 128  # A long list of one request must not fill the queue.


class EmbeddingGeneration(GenerationRequest):
    id_prefix = "embd-"

    body: EmbeddingRequest

    def __init__(self, body: EmbeddingRequest, model: ServedModel) -> None:
        model.embedding.require()
        pooling = Pooling(
            body.pooling or model.embedding.kind, body.dimensions, True if body.normalize is None else body.normalize
        )
        params, self._inputs = SamplingParams(max_tokens=0, pooling=pooling), body.inputs()
        super().__init__(
            body,
            model,
            params,
            prompt_parameter="input" if body.messages is None else "messages",
            num_prompts=len(self._inputs) or 1,
            at_once=PROMPTS_AT_ONCE,
        )

    def tokenize(self, max_tokens: int) -> Tokenized:
        body, prompts = self.body, [self._encode(text, max_tokens) for text in self._inputs]
        if body.messages is not None:
            prompt = encode_messages(
                self.model,
                body.messages,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final_message=bool(body.continue_final_message),
                max_tokens=max_tokens,
                **checked_variables(body.chat_template_kwargs, self.model.tokenizer),
            )
            prompts = [prompt]
        encoded = body.encoding_format == "base64"
        reply = partial(EmbeddingResponseBuilder, model=self.model.name, encoded=encoded)
        return Tokenized(prompts, self.params, reply)

    def _encode(self, text: str | list[int], max_tokens: int) -> list[int]:
        if not isinstance(text, str):
            return check_token_ids("input", text)
        check_texts("input", [text])
        return self.model.tokenizer.encode(text, max_tokens=max_tokens)

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


class PairGeneration(GenerationRequest):
    """A request for the scores of pairs of texts."""

    def __init__(
        self, body: ScoreRequest | RerankRequest, model: ServedModel, pairs: Sequence[Pair], prompt_parameter: str
    ) -> None:
        model.embedding.require()
        embedding = model.embedding
        self.scoring = make_pair_scoring(model.tokenizer, embedding.kind, embedding.answers, body.instruction)
        self.pairs = pairs
        super().__init__(
            body,
            model,
            SamplingParams(max_tokens=0, pooling=self.scoring.pooling),
            prompt_parameter=prompt_parameter,
            num_prompts=len(self.scoring.texts(pairs)),
            at_once=PROMPTS_AT_ONCE,
        )

    def tokenize(self, max_tokens: int) -> Tokenized:
        prompts = self.scoring.encode(self.model.tokenizer, self.pairs, max_tokens)
        return Tokenized(prompts, self.params, self._reply)

    def _reply(self, response_id: str, completion_ids: list[str], usage: Usage) -> PairResponseBuilder:
        return PairResponseBuilder(response_id, completion_ids, usage, self.model.name, self.scoring, self.pairs)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        named = error.parameter in ("prompt", "messages")
        return InvalidParameter(self.prompt_parameter, error.problem) if named else error


class PairResponseBuilder(PooledResponseBuilder):
    def __init__(
        self,
        response_id: str,
        completion_ids: list[str],
        usage: Usage,
        model: str,
        scoring: PairScoring,
        pairs: Sequence[Pair],
    ) -> None:
        super().__init__(response_id, completion_ids, usage, model)
        self._scoring = scoring
        self._pairs = pairs

    @property
    def scores(self) -> list[float]:
        return self._scoring.scores(self._pairs, self.vectors)

    def body(self) -> dict[str, Any]:
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(self.scores)]
        return {**self.head, "object": "list", "data": data, "usage": self.usage_body()}


class ScoreGeneration(PairGeneration):
    id_prefix = "score-"

    def __init__(self, body: ScoreRequest, model: ServedModel) -> None:
        sides = body.sides()
        for name, texts in sides.items():
            check_texts(name, [texts] if isinstance(texts, str) else texts)
        first, second = sides
        super().__init__(body, model, pair_up(sides[first], sides[second], (first, second)), second)


class RerankGeneration(PairGeneration):
    id_prefix = "rerank-"

    body: RerankRequest

    def __init__(self, body: RerankRequest, model: ServedModel) -> None:
        parameter, texts = body.documents_parameter(), body.document_texts()
        check_texts("query", [body.query])
        check_texts(parameter, texts)
        super().__init__(body, model, [(body.query, text) for text in texts], parameter)

    def _reply(self, response_id: str, completion_ids: list[str], usage: Usage) -> PairResponseBuilder:
        return RerankResponseBuilder(
            response_id, completion_ids, usage, self.model.name, self.scoring, self.pairs, self.body
        )


class RerankResponseBuilder(PairResponseBuilder):
    def __init__(
        self,
        response_id: str,
        completion_ids: list[str],
        usage: Usage,
        model: str,
        scoring: PairScoring,
        pairs: Sequence[Pair],
        body: RerankRequest,
    ) -> None:
        super().__init__(response_id, completion_ids, usage, model, scoring, pairs)
        self._body = body

    def body(self) -> Any:
        """Return the documents, most relevant first."""
        texts = self._body.document_texts()
        ranked = sorted(enumerate(self.scores), key=lambda one: (-one[1], one[0]))[: self._body.top_n]
        if self._body.in_teis_form:
            shown = bool(self._body.return_text)
            return [
                {"index": index, "score": score} | ({"text": texts[index]} if shown else {}) for index, score in ranked
            ]
        results = [
            {"index": index, "relevance_score": score}
            | ({} if self._body.return_documents is False else {"document": {"text": texts[index]}})
            for index, score in ranked
        ]
        return {**self.head, "results": results, "usage": self.usage_body()}
