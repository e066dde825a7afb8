"""POST /v1/embeddings, /v1/score and /v1/rerank: vectors and scores of prompts."""

from __future__ import annotations

import time
from abc import abstractmethod
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.core.sampling.params import Pooling, PoolingKind, SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import (
    EngineBody,
    GenerationRequest,
    Integer,
    ResponseBuilder,
    StrictModel,
    Tokenized,
)
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import checked_variables, encode_messages
from chairlift.server.openai.types import MAX_MESSAGES, TokenIds, check_token_ids, check_unicode
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.images import ChatImages
from chairlift.text.relevance import Pair, make_pair_scoring, pair_up

MAX_INPUTS = 2048  # OpenAI takes as many.
PROMPTS_AT_ONCE = 128  # A long list of one request must not fill the queue.

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


# ---- bodies ----------------------------------------------------------------------------------------------------------


class EmbeddingRequest(EngineBody):
    """OpenAI's parameters, `messages` in place of `input` as in vLLM, and `pooling` and `normalize`."""

    input: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Texts
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
        | None
    ) = None
    messages: Annotated[list[dict[str, Any]] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    pooling: PoolingKind | None = Field(default=None, strict=False)
    normalize: bool | None = None
    prompt_name: str | None = None

    def inputs(self) -> list[str | list[int]]:
        """The texts or tokens to embed; none with `messages`."""
        if (self.input is None) == (self.messages is None):
            raise InvalidParameter("input", "give either input or messages")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise InvalidParameter(name, "only goes with messages")
        given: Any = self.input
        if given is None:
            return []
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class ScoreRequest(EngineBody):
    """The parameters of vLLM, which has had several names for the same, and the `instruction` of a reranker."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    instruction: str | None = None

    def sides(self) -> dict[str, str | list[str]]:
        """The two sides of the pairs by the names that were given."""
        names = [self._given("text_1", "queries", "data_1"), self._given("text_2", "documents", "items", "data_2")]
        return {name: getattr(self, name) for name in names}

    def _given(self, *names: str) -> str:
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            raise InvalidParameter(names[0], "is missing", "missing_required_parameter")
        if len(given) > 1:
            raise InvalidParameter(given[1], f"was given together with {given[0]}; give one")
        return given[0]


class RerankDocument(StrictModel):
    text: str


class RerankRequest(EngineBody):
    """The parameters of Jina and Cohere or those of text-embeddings-inference (TEI), whose documents are `texts`, and
    the `instruction` of a reranker."""

    query: str
    documents: (
        Annotated[list[str | RerankDocument], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)] | None
    ) = None
    top_n: Integer | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    texts: Texts | None = None
    return_text: bool | None = None
    raw_scores: Literal[False] | None = None
    # Has no effect: a text that is too long is refused.
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None

    @property
    def in_teis_form(self) -> bool:
        return self.texts is not None

    def given_documents(self) -> tuple[str, list[str]]:
        """Return the name of the documents and their texts, once the parameters are known to go together."""
        if (self.documents is None) == (self.texts is None):
            raise InvalidParameter("documents", "give either documents or texts", "missing_required_parameter")
        others = ("return_documents",) if self.in_teis_form else ("return_text", "raw_scores")
        for name in others:
            if getattr(self, name) is not None:
                raise InvalidParameter(name, f"does not go with {'texts' if self.in_teis_form else 'documents'}")
        if self.top_n is not None and self.top_n < 1:
            raise InvalidParameter("top_n", f"must be at least 1, got {self.top_n}")
        if self.texts is not None:
            return "texts", self.texts
        return "documents", [one if isinstance(one, str) else one.text for one in self.documents or ()]


def check_texts(parameter: str, texts: list[str]) -> None:
    """Refuse empty texts and lone surrogates."""
    check_unicode(parameter, texts)
    if not all(texts):
        raise InvalidParameter(parameter, "must not be empty")


# ---- requests and responses ------------------------------------------------------------------------------------------


class PooledGeneration(GenerationRequest):
    """A request whose prompts become vectors."""

    @abstractmethod
    def response(self, head: dict[str, Any], vectors: list[bytes], usage: dict[str, Any]) -> Any:
        """Return the JSON values of the response to vectors of float32."""

    def reply(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        return PooledResponseBuilder(self, response_id, completion_ids, usage)


class PooledResponseBuilder(ResponseBuilder):
    """Collects the vectors of a request; its response is never streamed."""

    def __init__(
        self, request: PooledGeneration, response_id: str, completion_ids: Sequence[str], usage: Usage
    ) -> None:
        self.usage = usage
        self._request = request
        self._head = {"id": response_id, "created": int(time.time()), "model": request.model.name}
        self._vectors = dict.fromkeys(completion_ids, b"")

    def add(self, update: Update) -> None:
        self._vectors[update.request_id] += update.vector

    def body(self) -> Any:
        usage = dict.fromkeys(("prompt_tokens", "total_tokens"), self.usage.prompt_tokens)
        return self._request.response(self._head, list(self._vectors.values()), usage)

    def events(self, update: Update) -> list[bytes]:
        raise NotImplementedError

    def end_events(self) -> list[bytes]:
        raise NotImplementedError

    def error_events(self, error: APIError) -> list[bytes]:
        raise NotImplementedError


class EmbeddingGeneration(PooledGeneration):
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
            _, pictures = ChatImages.of(body.messages)
            if pictures.sources:
                pictures.refuse("embeddings are those of texts only")
            prompt = encode_messages(
                self.model,
                body.messages,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final_message=bool(body.continue_final_message),
                max_tokens=max_tokens,
                **checked_variables(body.chat_template_kwargs, self.model.tokenizer),
            )
            prompts = [prompt]
        return Tokenized(prompts, self.params, self.reply)

    def _encode(self, text: str | list[int], max_tokens: int) -> list[int]:
        if not isinstance(text, str):
            return check_token_ids("input", text)
        check_texts("input", [text])
        prompted = self.model.embedding.prompted(text, self.body.prompt_name)
        return self.model.tokenizer.encode(prompted, max_tokens=max_tokens)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(self.prompt_parameter) if error.parameter == "prompt" else error

    def response(self, head: dict[str, Any], vectors: list[bytes], usage: dict[str, Any]) -> Any:
        encoded = self.body.encoding_format == "base64"
        shown = [b64encode(vector).decode() if encoded else array("f", vector).tolist() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
        return {**head, "object": "list", "data": data, "usage": usage}


class PairGeneration(PooledGeneration):
    """A request for the scores of pairs of texts."""

    def __init__(
        self, body: ScoreRequest | RerankRequest, model: ServedModel, pairs: Sequence[Pair], prompt_parameter: str
    ) -> None:
        model.embedding.require()
        embedding = model.embedding
        options: dict[str, Any] = {"labels": embedding.labels, "raw_scores": embedding.raw_scores}
        self._scoring = make_pair_scoring(
            model.tokenizer, embedding.kind, embedding.answers, body.instruction, **options
        )
        self._pairs = pairs
        super().__init__(
            body,
            model,
            SamplingParams(max_tokens=0, pooling=self._scoring.pooling),
            prompt_parameter=prompt_parameter,
            num_prompts=len(self._scoring.texts(pairs)),
            at_once=PROMPTS_AT_ONCE,
        )

    def tokenize(self, max_tokens: int) -> Tokenized:
        prompts = self._scoring.encode(self.model.tokenizer, self._pairs, max_tokens)
        return Tokenized(prompts, self.params, self.reply)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        named = error.parameter in ("prompt", "messages")
        return InvalidParameter(self.prompt_parameter, error.problem) if named else error

    def scores(self, vectors: list[bytes]) -> list[float]:
        return self._scoring.scores(self._pairs, [array("f", vector) for vector in vectors])


class ScoreGeneration(PairGeneration):
    id_prefix = "score-"

    def __init__(self, body: ScoreRequest, model: ServedModel) -> None:
        sides = body.sides()
        for name, texts in sides.items():
            check_texts(name, [texts] if isinstance(texts, str) else texts)
        first, second = sides
        super().__init__(body, model, pair_up(sides[first], sides[second], (first, second)), second)

    def response(self, head: dict[str, Any], vectors: list[bytes], usage: dict[str, Any]) -> Any:
        scores = enumerate(self.scores(vectors))
        data = [{"object": "score", "index": index, "score": score} for index, score in scores]
        return {**head, "object": "list", "data": data, "usage": usage}


class RerankGeneration(PairGeneration):
    id_prefix = "rerank-"

    body: RerankRequest

    def __init__(self, body: RerankRequest, model: ServedModel) -> None:
        parameter, self._texts = body.given_documents()
        check_texts("query", [body.query])
        check_texts(parameter, self._texts)
        super().__init__(body, model, [(body.query, text) for text in self._texts], parameter)

    def response(self, head: dict[str, Any], vectors: list[bytes], usage: dict[str, Any]) -> Any:
        """Return the documents, most relevant first."""
        body, texts = self.body, self._texts
        ranked = sorted(enumerate(self.scores(vectors)), key=lambda one: (-one[1], one[0]))[: body.top_n]
        if body.in_teis_form:
            return [
                {"index": index, "score": score} | ({"text": texts[index]} if body.return_text else {})
                for index, score in ranked
            ]
        results = [
            {"index": index, "relevance_score": score}
            | ({} if body.return_documents is False else {"document": {"text": texts[index]}})
            for index, score in ranked
        ]
        return {**head, "results": results, "usage": usage}
