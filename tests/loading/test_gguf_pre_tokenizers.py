"""How names of GGUF files split text, compared with published tokenizer.json files and with llama.cpp's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from chairlift.loading.gguf.file import GGUFFile
from chairlift.loading.gguf.tokenizer import gguf_tokenizer
from tests.loading.gguf_writing import finish

SAMPLES = (
    "I'M sure they'll say: HelloWorld 12345½ x_y//\n\n é!\t",
    "def ride(lift, riders):\n\n    for r in riders:  # 3.14159, 0x1F\r\n\treturn lift[r] += `x`\n   ",
    "Schöne Grüße! Où est la neige? Снег идёт, 2024 год. Ἀθῆναι, Ελλάδα ’quoted’.",
    "雪が降っています。カタカナ１２３、漢字123中文。 한국어 텍스트 42개, 中文!",
    "مرحبا بالعالم ٣٤٥ हिन्दी ९८७ ไทย ๑๒๓ 𝟏𝟐𝟑 ²³¹ ¼м",
    "price: $1,234,567.89 (+12%) <a href='x'>~user^2</a> | `code` == \"text\" … — end  ",
    "👍🏽 emoji 🇨🇭 e\u0301 combining \u00a0nbsp \u3000wide\u2028line",
)
TEXTS = st.text(
    st.one_of(st.sampled_from(sorted(set("".join(SAMPLES)))), st.characters(exclude_categories=["Cs"])), max_size=30
)

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
NFC = {"type": "NFC"}


def isolated(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
CASED = r"A-Za-zµÀ-ÖØ-öø-ƺͰ-ͳΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅḀ-ἕἘ-Ἕἠ-ὅὐ-ὗᾶ-ᾼῂ-ῄῆ-ῌＡ-Ｚａ-ｚ"

# The steps of tokenizer.json: of THUDM/glm-4-9b-hf, zai-org/glm-4-9b-chat-hf, bigcode/starcoder2-3b, CohereLabs'
# Command R (whose class in transformers has the same), LGAI-EXAONE/EXAONE-4.0-32B, tencent/Hunyuan-4B-Instruct,
# ByteDance-Seed's models, smallcloudai/Refact-1_6-base, tiiuae/Falcon3-7B-Base and deepseek-ai's.
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "glm4": [isolated(CL100K), BYTES],
    "chatglm-bpe": [isolated(CL100K), BYTES],
    "starcoder": [DIGITS, GPT2],
    "refact": [DIGITS, GPT2],
    "command-r": [NFC, DIGITS, GPT2],
    "exaone4": [GPT2],
    "hunyuan-dense": [*map(isolated, DEEPSEEK3), BYTES],
    "deepseek-v3": [*map(isolated, DEEPSEEK3), BYTES],
    "seed-coder": [isolated(SEED), BYTES],
    "seed_oss": [isolated(SEED), BYTES],
    "falcon3": [{"type": "Punctuation", "behavior": "Contiguous"}, GPT2, DIGITS],
    "deepseek-llm": [
        *map(isolated, ["[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", ASIAN]),
        DIGITS,
        BYTES,
    ],
    "deepseek-coder": [*map(isolated, ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN]), DIGITS, BYTES],
}

LLAMA_CPP_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_CPP_CL100K = CL100K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL])")
# The expressions that llama.cpp applies one after another (src/llama-vocab.cpp), where its pieces are ours.
LLAMA_CPP = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", LLAMA_CPP_GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "glm4": [LLAMA_CPP_CL100K],
    "chatglm-bpe": [LLAMA_CPP_CL100K],
    "starcoder": [r"\p{N}", LLAMA_CPP_GPT2],
    "refact": [r"\p{N}", LLAMA_CPP_GPT2],
    "command-r": [r"\p{N}", LLAMA_CPP_GPT2],
    "exaone4": [LLAMA_CPP_GPT2],
    "hunyuan-dense": DEEPSEEK3,
    "deepseek-v3": DEEPSEEK3,
    "seed-coder": [SEED],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"],
}
NAMES = sorted(PUBLISHED.keys() | LLAMA_CPP.keys())


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: named(name, tmp_path_factory.mktemp("names")) for name in NAMES}


def named(pre: str, folder: Path) -> Tokenizer:
    writer = GGUFWriter(folder / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(pre_tokenizers.ByteLevel.alphabet()))
    writer.add_token_merges([])
    finish(writer)
    return gguf_tokenizer(GGUFFile(folder / "x.gguf")).tokenizer


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces as the model gets them: letters that stand for bytes."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def from_json(steps: list[dict[str, Any]]) -> Tokenizer:
    normalizer = NFC if NFC in steps else None
    steps = [step for step in steps if step is not NFC]
    model = {"type": "BPE", "vocab": {}, "merges": []}
    file = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    return Tokenizer.from_str(json.dumps(file | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}))


def llama_cpp_pieces(patterns: list[str], text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return [piece for piece, _ in steps.pre_tokenize_str(text)]


REFERENCES = {name: from_json(steps) for name, steps in PUBLISHED.items()}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("text", SAMPLES)
def test_samples_are_split_as_the_published_tokenizer_does(name: str, text: str, ours: dict[str, Tokenizer]) -> None:
    assert pieces(ours[name], text) == pieces(REFERENCES[name], text)


@pytest.mark.parametrize("name", LLAMA_CPP)
@pytest.mark.parametrize("text", SAMPLES[:-1])
def test_samples_are_split_as_llama_cpp_does(name: str, text: str, ours: dict[str, Tokenizer]) -> None:
    assert pieces(ours[name], text) == llama_cpp_pieces(LLAMA_CPP[name], text)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_any_text_is_split_as_the_published_tokenizer_does(text: str, ours: dict[str, Tokenizer]) -> None:
    for name, reference in REFERENCES.items():
        if name != "deepseek-llm":  # the reference here has some of the letters only
            assert pieces(ours[name], text) == pieces(reference, text), name


@pytest.mark.parametrize(
    ("name", "text", "expected", "patterns", "theirs"),
    [
        ("falcon3", "it's 123", ["it", "'", "s", "Ġ", "1", "2", "3"], [LLAMA_CPP_CL100K], ["it", "'s", "Ġ", "123"]),
        ("deepseek-llm", "a 123", ["a", "Ġ", "1", "2", "3"], [r"\s?[A-Za-z]+", r"\p{N}+"], ["a", "Ġ", "123"]),
        ("command-r", "e\u0301", ["Ã©"], LLAMA_CPP["command-r"], ["e", "Ìģ"]),
    ],
)
def test_where_llama_cpp_differs_the_published_tokenizer_counts(
    name: str, text: str, expected: list[str], patterns: list[str], theirs: list[str], ours: dict[str, Tokenizer]
) -> None:
    assert pieces(ours[name], text) == pieces(REFERENCES[name], text) == expected
    assert llama_cpp_pieces(patterns, text) == theirs


@pytest.mark.parametrize("text", ["a \u3000 \t ", "😀   ", "  😀  ", " \n  \n ", "中  😀 \t"])
def test_spaces_at_an_end_are_split_as_published(text: str, ours: dict[str, Tokenizer]) -> None:
    assert pieces(ours["deepseek-llm"], text) == pieces(REFERENCES["deepseek-llm"], text)


@pytest.mark.parametrize("name", NAMES)
def test_long_runs_of_spaces_do_not_freeze(name: str, ours: dict[str, Tokenizer]) -> None:
    assert "".join(pieces(ours[name], " " * 400_000 + "😀")) == "Ġ" * 400_000 + "ðŁĺĢ"


def test_letters_that_deepseek_did_not_know_stand_alone(ours: dict[str, Tokenizer]) -> None:
    tokenizer = ours["deepseek-llm"]
    assert len(pieces(tokenizer, "Աբ ab")) == 3  # capital Armenian letters have a range, small ones do not
    assert len(pieces(tokenizer, "ᏣᎳᎩ ab")) == 2
    assert len(pieces(tokenizer, "K Ω ΐ")) == 3
