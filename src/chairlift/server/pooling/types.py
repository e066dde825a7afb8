"""Request bodies of embeddings, scores and rerankings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.core.sampling.pooling import PoolingKind
from chairlift.errors import InvalidParameter
from chairlift.server.openai.strict import StrictModel
from chairlift.server.openai.types import EngineBody, Integer, TokenIds, check_unicode

MAX_INPUTS = 2048  # as OpenAI

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class EmbeddingRequest(EngineBody):
    """OpenAI's parameters, and `pooling` and `normalize`."""

    input: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Texts
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    pooling: PoolingKind | None = Field(default=None, strict=False)
    normalize: bool | None = None

    def inputs(self) -> list[str | list[int]]:
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class ScoreRequest(EngineBody):
    """vLLM's parameters, and the `instruction` of a reranker."""

    text_1: str | Texts
    text_2: str | Texts
    instruction: str | None = None


class RerankDocument(StrictModel):
    text: str


class RerankRequest(EngineBody):
    """The parameters of Jina and Cohere, and the `instruction` of a reranker."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    top_n: Integer | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def check_top_n(self) -> None:
        if self.top_n is not None and self.top_n < 1:
            raise InvalidParameter("top_n", f"must be at least 1, got {self.top_n}")


def check_texts(parameter: str, texts: list[str]) -> None:
    """Refuse empty texts and lone surrogates."""
    check_unicode(parameter, texts)
    if not all(texts):
        raise InvalidParameter(parameter, "must not be empty")
