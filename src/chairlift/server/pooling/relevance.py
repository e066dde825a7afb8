"""POST /v1/score and /v1/rerank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.pooling.builder import PooledResponseBuilder
from chairlift.server.pooling.embeddings import PROMPTS_AT_ONCE
from chairlift.server.pooling.types import RerankRequest, ScoreRequest, check_texts
from chairlift.server.served_model import ServedModel
from chairlift.text.relevance import Pair, PairScoring, make_pair_scoring, pair_up


class PairGeneration(GenerationRequest):
    """A request for the scores of pairs of texts."""

    at_once = PROMPTS_AT_ONCE

    def __init__(self, body: ScoreRequest | RerankRequest, model: ServedModel, pairs: Sequence[Pair]) -> None:
        model.embedding.require()
        embedding = model.embedding
        self.scoring = make_pair_scoring(model.tokenizer, embedding.kind, embedding.answers, body.instruction)
        super().__init__(body, SamplingParams(max_tokens=0, pooling=self.scoring.pooling))
        self.pairs = pairs
        self.model = model
        self.num_prompts = len(self.scoring.texts(pairs))

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        return TokenizedPrompts(self.scoring.encode(self.model.tokenizer, self.pairs, max_tokens), self.params)

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
        self.prompt_parameter = second
        super().__init__(body, model, pair_up(sides[first], sides[second], (first, second)))

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> PairResponseBuilder:
        return PairResponseBuilder(response_id, completion_ids, usage, self.model.name, self.scoring, self.pairs)


class RerankGeneration(PairGeneration):
    id_prefix = "rerank-"

    def __init__(self, body: RerankRequest, model: ServedModel) -> None:
        self.prompt_parameter = body.documents_parameter()
        texts = body.document_texts()
        check_texts("query", [body.query])
        check_texts(self.prompt_parameter, texts)
        super().__init__(body, model, [(body.query, text) for text in texts])
        self._body = body

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> PairResponseBuilder:
        return RerankResponseBuilder(
            response_id, completion_ids, usage, self.model.name, self.scoring, self.pairs, self._body
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
