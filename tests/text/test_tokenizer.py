"""Settings, special tokens and BOS of the tokenizer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text.tokenizer import Tokenizer
from tests.text import backends


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = backends.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer(backend)
    text = "never stops for boarding"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]


def test_special_tokens() -> None:
    tokenizer = Tokenizer(backends.byte_level(), eos_token="<|im_end|>")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.vocab_size == 402
    assert tokenizer.decode([1, *tokenizer.encode("a")], skip_special_tokens=False) == "<|im_start|>a"
    assert tokenizer.decode([1, *tokenizer.encode("a")]) == "a"


def test_bos_is_prepended_once() -> None:
    plain = Tokenizer(backends.byte_fallback(strip=True))
    tokenizer = Tokenizer(backends.byte_fallback(strip=True), bos_token="<s>", add_bos=True)
    ids = plain.encode("a")
    assert tokenizer.encode("a") == [1, *ids]
    assert tokenizer.encode("") == [1, *plain.encode("")]
    assert tokenizer.encode_batch(["a", "b"]) == [[1, *ids], [1, *plain.encode("b")]]
    assert tokenizer.encode("a", add_special_tokens=False) == ids
    assert tokenizer.encode("<s>a").count(1) == 1


def test_bos_of_the_backend_is_not_doubled() -> None:
    backend = backends.byte_fallback(strip=True)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(backend, bos_token="<s>", add_bos=True)
    assert tokenizer.encode("a").count(1) == 1
    assert tokenizer.encode("a", add_special_tokens=False).count(1) == 0


def test_an_unknown_bos_token_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="add_bos: needs a bos_token"):
        Tokenizer(backends.byte_level(), bos_token="<nope>", add_bos=True)


@pytest.mark.parametrize("bad", ["\ud800", 5, None, ["a"]])
def test_values_other_than_text_are_refused(bad: object) -> None:
    tokenizer = Tokenizer(backends.byte_level())
    with pytest.raises(InvalidParameter, match="prompt"):
        tokenizer.encode(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="prompt"):
        tokenizer.encode_batch(["fine", bad])  # type: ignore[list-item]


def test_the_text_layer_imports_nothing_heavy() -> None:
    check = (
        "import sys, chairlift.text.tokenizer, chairlift.text.stop_strings;"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_an_error_of_the_backend_is_an_unsupported_model() -> None:
    tokenizer = Tokenizer(Backend(models.WordLevel({}, unk_token="missing")))
    with pytest.raises(UnsupportedModel, match="tokenizer failed on this text"):
        tokenizer.encode("word")
