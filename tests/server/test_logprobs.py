"""Log-probabilities of tokens that are parts of characters."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from chairlift.core.plan import TokenLogprobs
from chairlift.server.openai.response_builder import CompletionLogprobs, chat_logprobs
from chairlift.text.tokenizer import Tokenizer
from tests.tiny import byte_level_tokenizer

BYTES = Tokenizer(byte_level_tokenizer())


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁a", "a", "▁", "<0xE2>", "<0x82>", "<0xAC>", "<0x61>"]
    vocab = [(piece, -float(index)) for index, piece in enumerate(pieces)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def scored(ids: list[int], top: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    return [TokenLogprobs(one, -0.5, 1, tuple((other, -0.5 - place) for place, other in enumerate(top))) for one in ids]


@pytest.mark.parametrize("tokenizer", [BYTES, metaspace()], ids=["byte-level", "metaspace"])
def test_token_bytes_add_up_to_the_text_and_offsets_point_into_it(tokenizer: Tokenizer) -> None:
    text = "a € a" if tokenizer is BYTES else "a a€a"
    ids = tokenizer.encode(text)
    entries = chat_logprobs(scored(ids), tokenizer)
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode().removeprefix("" if tokenizer is BYTES else " ") == text
    assert not any("\ufffd" in entry["token"] for entry in entries)
    assert any(entry["token"].startswith("\\x") for entry in entries)  # a part of the euro sign
    result = CompletionLogprobs().add(scored(ids), tokenizer)
    assert len(set(result["tokens"])) >= 4
    ends = [*result["text_offset"][1:], len(text)]
    for token, begin, end in zip(result["tokens"], result["text_offset"], ends, strict=True):
        if begin == 0 and tokenizer is not BYTES:
            token = token.removeprefix(" ")  # the text does not begin with it
        assert text[begin:end] == token or token.startswith("bytes:\\x")


def test_offsets_continue_across_chunks() -> None:
    ids = BYTES.encode("a € b")
    whole, parts = CompletionLogprobs(), CompletionLogprobs()
    pieces = [parts.add(scored([token]), BYTES)["text_offset"][0] for token in ids]
    assert pieces == whole.add(scored(ids), BYTES)["text_offset"]


def test_the_most_probable_of_tokens_with_the_same_text_is_kept() -> None:
    tokenizer = metaspace()
    a, byte_a = tokenizer.token_id("a"), tokenizer.token_id("<0x61>")
    assert a is not None
    assert byte_a is not None
    euro = tuple(tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "€".encode())
    result = CompletionLogprobs().add(scored([a], (a, byte_a, *euro)), tokenizer)
    assert result["top_logprobs"] == [{"a": -0.5, "bytes:\\xe2": -2.5, "bytes:\\x82": -3.5, "bytes:\\xac": -4.5}]
