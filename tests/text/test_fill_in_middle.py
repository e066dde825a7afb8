"""Fill-in-the-middle prompts of the families."""

from __future__ import annotations

import pytest

from chairlift.errors import InvalidParameter
from chairlift.text.fill_in_middle import encode_fill_in_middle
from chairlift.text.tokenizer import Tokenizer
from tests.tiny import byte_level_tokenizer


@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]a"),
    ],
)
def test_the_markers_of_the_tokenizer_are_used(markers: list[str], expected: str) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(more_special=markers))
    assert encode_fill_in_middle(tokenizer, "a", "b") == tokenizer.encode(expected)
    assert encode_fill_in_middle(tokenizer, tokenizer.encode("a"), "b") == tokenizer.encode(expected)


def test_the_prompt_begins_with_bos_where_all_prompts_do() -> None:
    backend = byte_level_tokenizer(more_special=["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    tokenizer = Tokenizer(backend, bos_token="<|endoftext|>", add_bos=True)
    expected = tokenizer.encode("<fim_prefix>a<fim_suffix>b<fim_middle>")
    assert encode_fill_in_middle(tokenizer, "a", "b") == expected
    assert expected[0] == tokenizer.token_id("<|endoftext|>")


@pytest.mark.parametrize("markers", [[], ["<fim_prefix>", "<fim_suffix>"]])
def test_tokenizers_without_all_markers_are_refused(markers: list[str]) -> None:
    with pytest.raises(InvalidParameter, match="suffix: is not supported"):
        encode_fill_in_middle(Tokenizer(byte_level_tokenizer(more_special=markers)), "a", "b")
