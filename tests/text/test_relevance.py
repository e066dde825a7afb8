"""Prompts and scores of pairs of texts."""

from __future__ import annotations

import math

import pytest

from chairlift.core.sampling.params import PoolingKind
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text.relevance import AnswerScoring, CosineScoring, make_pair_scoring, pair_up
from chairlift.text.tokenizer import Tokenizer
from tests.tiny import CHATML, byte_level_tokenizer

RERANKER = (
    "{% for message in messages %}{% if message.role == 'query' %}Q: {{ message.content }}"
    "{% elif message.role == 'document' %} D: {{ message.content }}"
    "{% else %}I: {{ message.content }} {% endif %}{% endfor %} A:"
)


def tokenizer(template: str = CHATML) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(more_special=["yes", "no"]), chat_template=template)


def test_a_text_in_several_pairs_is_embedded_once() -> None:
    scoring = CosineScoring(PoolingKind.MEAN)
    pairs = [("a", "b"), ("a", "c"), ("a", "b")]
    assert scoring.texts(pairs) == ["a", "b", "c"]
    assert scoring.encode(tokenizer(), pairs) == [tokenizer().encode(text) for text in "abc"]
    assert scoring.scores(pairs, [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]) == [0.6, 0.0, 0.6]


def test_the_template_of_a_reranker_is_used() -> None:
    own = tokenizer(RERANKER)
    scoring = make_pair_scoring(own, PoolingKind.MEAN, None, "find")
    assert isinstance(scoring, AnswerScoring)
    assert scoring.encode(own, [("lift?", "a lift")]) == [own.encode("I: find Q: lift? D: a lift A:")]
    assert scoring.pooling.token_ids == (own.token_id("no"), own.token_id("yes"))
    low, high = scoring.scores([("", "")] * 2, [[3.0, 1.0], [-1000.0, 1000.0]])
    assert low == pytest.approx(math.exp(1) / (math.exp(1) + math.exp(3)))
    assert high == 1.0
    assert scoring.scores([("", "")], [[1000.0, -1000.0]]) == [pytest.approx(0.0)]


def test_answers_must_be_tokens() -> None:
    with pytest.raises(UnsupportedModel, match="not tokens"):
        make_pair_scoring(tokenizer(), PoolingKind.MEAN, ("never", "always"))


def test_thinking_is_switched_off_where_the_template_can() -> None:
    template = CHATML + "{% if enable_thinking is false %}<think></think>{% endif %}"
    own = tokenizer(template)
    (prompt,) = AnswerScoring(own, ("no", "yes")).encode(own, [("a", "b")])
    assert own.decode(prompt).endswith("<Query>: a\n<Document>: b\nassistant\n<think></think>")


def test_pairs() -> None:
    assert pair_up("a", ["b", "c"], ("x", "y")) == [("a", "b"), ("a", "c")]
    assert pair_up(["a", "d"], ["b", "c"], ("x", "y")) == [("a", "b"), ("d", "c")]
    for first, second, name in (("a", [], "y"), (["a", "b"], "c", "x"), ("a", [3], "y")):
        with pytest.raises(InvalidParameter) as caught:
            pair_up(first, second, ("x", "y"))  # type: ignore[arg-type]
        assert caught.value.parameter == name
