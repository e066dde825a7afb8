"""Scores of pairs of texts: by the cosine of their embeddings, or by a reranker's answer to a question."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import mul

from chairlift.core.sampling.params import Pooling, PoolingKind
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text.tokenizer import Tokenizer

Pair = tuple[str, str]  # a query and a document

ANSWERS = ("no", "yes")
# The wording that Qwen3-Reranker was trained with.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairScoring(ABC):
    """Prompts for pairs of texts, and the scores that follow from their pooled vectors."""

    pooling: Pooling

    @abstractmethod
    def texts(self, pairs: Sequence[Pair]) -> Sequence[object]:
        """One item for each prompt that these pairs need."""

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, pairs: Sequence[Pair], max_tokens: int | None = None) -> list[list[int]]:
        """The prompts, in the order of `texts`."""

    @abstractmethod
    def scores(self, pairs: Sequence[Pair], vectors: Sequence[Sequence[float]]) -> list[float]:
        """One score for each pair; `vectors` are those of the prompts."""


class CosineScoring(PairScoring):
    """The cosine of two embeddings; a text in several pairs is embedded once."""

    def __init__(self, kind: PoolingKind) -> None:
        self.pooling = Pooling(kind)

    def texts(self, pairs: Sequence[Pair]) -> list[str]:
        return [*dict.fromkeys(text for pair in pairs for text in pair)]

    def encode(self, tokenizer: Tokenizer, pairs: Sequence[Pair], max_tokens: int | None = None) -> list[list[int]]:
        return [tokenizer.encode(text, max_tokens=max_tokens) for text in self.texts(pairs)]

    def scores(self, pairs: Sequence[Pair], vectors: Sequence[Sequence[float]]) -> list[float]:
        found = dict(zip(self.texts(pairs), vectors, strict=True))
        return [sum(map(mul, found[first], found[second])) for first, second in pairs]


class AnswerScoring(PairScoring):
    """The probability that a reranker answers "yes" rather than "no"."""

    def __init__(self, tokenizer: Tokenizer, answers: tuple[str, str], instruction: str | None = None) -> None:
        ids = [tokenizer.token_id(answer) for answer in answers]
        self.pooling = Pooling.logits([token for token in ids if token is not None])
        if len(self.pooling.token_ids) < 2:
            raise UnsupportedModel(f"the reranker's answers {answers} are not tokens of its vocabulary")
        self._instruction = INSTRUCTION if instruction is None else instruction

    def texts(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        return pairs

    def encode(self, tokenizer: Tokenizer, pairs: Sequence[Pair], max_tokens: int | None = None) -> list[list[int]]:
        return [self._encode(tokenizer, *pair, max_tokens) for pair in pairs]

    def _encode(self, tokenizer: Tokenizer, query: str, document: str, max_tokens: int | None) -> list[int]:
        if asks_relevance(tokenizer):
            messages = [
                {"role": "system", "content": self._instruction},
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ]
            return tokenizer.encode_chat(messages, max_tokens=max_tokens)[1]
        question = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
        # The answer is to follow at once, without reasoning before it.
        options = {"enable_thinking": False} if "enable_thinking" in (tokenizer.chat_template or "") else {}
        return tokenizer.encode_chat(messages, max_tokens=max_tokens, **options)[1]

    def scores(self, pairs: Sequence[Pair], vectors: Sequence[Sequence[float]]) -> list[float]:
        return [1 / (1 + math.exp(min(no - yes, 700.0))) for no, yes in vectors]


class ClassifierScoring(PairScoring):
    """The number that a classifier's head gives a pair, as it is or through a sigmoid."""

    pooling = Pooling(PoolingKind.CLS, normalize=False, labels=True)

    def __init__(self, *, raw_scores: bool) -> None:
        self._raw = raw_scores

    def texts(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        return pairs

    def encode(self, tokenizer: Tokenizer, pairs: Sequence[Pair], max_tokens: int | None = None) -> list[list[int]]:
        return [tokenizer.encode_pair(*pair, max_tokens=max_tokens) for pair in pairs]

    def scores(self, pairs: Sequence[Pair], vectors: Sequence[Sequence[float]]) -> list[float]:
        numbers = [float(vector[0]) for vector in vectors]
        return numbers if self._raw else [1 / (1 + math.exp(min(-number, 700.0))) for number in numbers]


def asks_relevance(tokenizer: Tokenizer) -> bool:
    """Whether the chat template is that of a reranker, with the roles "query" and "document"."""
    template = tokenizer.chat_template or ""
    return all(f'"{role}"' in template or f"'{role}'" in template for role in ("query", "document"))


def make_pair_scoring(
    tokenizer: Tokenizer,
    kind: PoolingKind,
    answers: tuple[str, str] | None,
    instruction: str | None = None,
    *,
    labels: int | None = None,
    raw_scores: bool = False,
) -> PairScoring:
    """By a classifier's head or the answers of a reranker if the checkpoint is one, else by cosine."""
    if labels is not None:
        if labels > 1:
            raise UnsupportedModel(f"the model has {labels} labels; scores of pairs need a head with one")
        if instruction is not None:
            raise InvalidParameter("instruction", "has no place in the input of a cross-encoder")
        return ClassifierScoring(raw_scores=raw_scores)
    if answers is None and asks_relevance(tokenizer):
        answers = ANSWERS
    if answers is not None:
        return AnswerScoring(tokenizer, answers, instruction)
    if instruction is not None:
        raise InvalidParameter("instruction", "only goes with a reranker; this model compares embeddings")
    return CosineScoring(kind)


def pair_up(first: str | Sequence[str], second: str | Sequence[str], names: tuple[str, str]) -> list[Pair]:
    """Pairs of two lists of equal length, or of one text with each of a list."""
    firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (first, second))
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not texts:
            raise InvalidParameter(name, "is empty; give at least one text")
        for text in texts:
            if not isinstance(text, str):
                raise InvalidParameter(name, f"must be a text or a list of texts, got {type(text).__name__}")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidParameter(
            names[0], f"has {len(firsts)} texts, but {names[1]} has {len(seconds)}; give 1 or as many"
        )
    return list(zip(firsts, seconds, strict=True))
