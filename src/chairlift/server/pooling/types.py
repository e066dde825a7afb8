"""Request bodies of embeddings, scores and rerankings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.core.sampling.params import PoolingKind
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import EngineBody, Integer, StrictModel
from chairlift.server.openai.types import MAX_MESSAGES, TokenIds, check_unicode

MAX_INPUTS = 2048  # OpenAI takes as many.

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


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

    def documents_parameter(self) -> str:
        """Return the name of the documents, once the parameters are known to go together."""
        if (self.documents is None) == (self.texts is None):
            raise InvalidParameter("documents", "give either documents or texts", "missing_required_parameter")
        others = ("return_documents",) if self.in_teis_form else ("return_text", "raw_scores")
        for name in others:
            if getattr(self, name) is not None:
                raise InvalidParameter(name, f"does not go with {'texts' if self.in_teis_form else 'documents'}")
        if self.top_n is not None and self.top_n < 1:
            raise InvalidParameter("top_n", f"must be at least 1, got {self.top_n}")
        return "texts" if self.in_teis_form else "documents"

    def document_texts(self) -> list[str]:
        return self.texts or [one if isinstance(one, str) else one.text for one in self.documents or ()]


def check_texts(parameter: str, texts: list[str]) -> None:
    """Refuse empty texts and lone surrogates."""
    check_unicode(parameter, texts)
    if not all(texts):
        raise InvalidParameter(parameter, "must not be empty")
