"""How text is split before byte-level BPE, by the name that a GGUF file gives (`tokenizer.ggml.pre`).

The names and rules are those of llama.cpp. Where its rule differs from the tokenizer.json that the model was published
with, the latter is followed, since the model was trained with it; each such place says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.metadata import Metadata

UNNAMED = "default"  # what a file without a name means

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The letters with case that DeepSeek's first tokenizers know, as code points.
_CASED_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_MARKS = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"
_UNSPACED = "800-9fa5 ac00-d7ff"  # scripts from Samaritan to Chinese, and Korean


def _class(code_points: str) -> str:
    """A class of characters from code points and ranges of them, in hexadecimal."""
    return "[" + re.sub("[0-9a-f]+", r"\\x{\g<0>}", code_points).replace(" ", "") + "]"


def _split(pattern: str) -> PreTokenizer:
    return Split(Regex(pattern), behavior="isolated")


def _words(digits: str, line_ends: str = r"[\r\n]*") -> PreTokenizer:
    marks = rf" ?[^\s\p{{L}}\p{{N}}]+{line_ends}" if line_ends else r" ?[^\s\p{L}\p{N}\r\n]+"
    return _split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{marks}|{_SPACES}")


def _cased_words(digits: str, suffix: str) -> PreTokenizer:
    start = r"[^\r\n\p{L}\p{N}]?"
    return _split(
        rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2_WORDS = ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = Digits(individual_digits=True)
_LINE_ENDS = _split(r"[\r\n]")
_THREE_DIGITS = r"\p{N}{1,3}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The steps that split text, in order, and what else a name decides."""

    steps: tuple[PreTokenizer, ...]
    nfc: bool = False
    whole_words: bool = False  # a word in the vocabulary is one token, regardless of merges
    add_bos: bool = False  # The file may say otherwise.


# llama.cpp's for files without a name. It is no model's: converters of today write a name.
_DEFAULT = Rules((_split(r"[\p{P}$+<=>^~|]+"), _split(_GPT2_PATTERN), _split(r"\p{N}+"), _split("[0-9]{3}"), _BYTES))
_GPT2 = Rules((_GPT2_WORDS,))
_SMOLLM = Rules((_DIGITS, _GPT2_WORDS))
_COMMAND_R = Rules(_SMOLLM.steps, nfc=True)  # llama.cpp does not compose characters
_LLAMA3 = Rules((_words(_THREE_DIGITS), _BYTES), whole_words=True, add_bos=True)
_CL100K = Rules(_LLAMA3.steps)
_QWEN2 = Rules((_words(r"\p{N}"), _BYTES), nfc=True)  # llama.cpp does not compose characters
_SEED = Rules((_words(r"\p{N}", line_ends=""), _BYTES))
_TEKKEN = Rules((_cased_words(r"\p{N}", ""), _BYTES), whole_words=True, add_bos=True)
_O200K = Rules((_cased_words(_THREE_DIGITS, f"{_CONTRACTIONS}?"), _BYTES))
# llama.cpp splits as Llama 3 does; the rest is its own. The published file looks for digits after the bytes, of which
# some have the letters ², ³, ¹, ¼, ½ and ¾.
_FALCON3 = Rules((Punctuation("contiguous"), _GPT2_WORDS, _DIGITS), whole_words=True, add_bos=True)
_DEEPSEEK_LLM = Rules(
    (
        _LINE_ENDS,
        _split(rf"\s?{_class(_CASED_LETTERS)}+"),
        _split(rf"\s?{_class(_MARKS)}+"),
        _split(r"(?<!\s)\s++$"),  # The published \s+$ finds the same, in time that is quadratic in a run of spaces.
        _split(f"{_class(_UNSPACED)}+"),
        _DIGITS,  # llama.cpp keeps them together
        _BYTES,
    )
)
_DEEPSEEK_CODER = Rules(
    (_LINE_ENDS, _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(f"{_class(_UNSPACED)}+"), _DIGITS, _BYTES)
)
_DEEPSEEK3 = Rules(
    (
        _split(_THREE_DIGITS),
        _split(f"{_class('4e00-9fa5 3040-30ff')}+"),
        _split(
            rf"{_class('21-2f 3a-40 5b-60 7b-7e')}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
        ),
        _BYTES,
    )
)

PRE_TOKENIZERS = {
    UNNAMED: _DEFAULT,
    "gpt-2": _GPT2,
    "exaone4": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "refact": _SMOLLM,  # Granite too
    "starcoder": _SMOLLM,
    "command-r": _COMMAND_R,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "chatglm-bpe": _CL100K,
    "dbrx": _CL100K,  # OLMo 2, Phi 4
    "glm4": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,  # Qwen 3 too
    "deepseek-r1-qwen": _QWEN2,
    "seed-coder": _SEED,  # what llama.cpp writes for Seed-OSS
    "seed_oss": _SEED,
    "tekken": _TEKKEN,  # Mistral since Nemo
    "gpt-4o": _O200K,  # Phi 4 mini
    "llama4": _O200K,
    "falcon3": _FALCON3,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
}


def pre_tokenizer_name(settings: Metadata) -> str:
    return settings.string("pre") or UNNAMED


def pre_tokenizer_rules(settings: Metadata) -> Rules:
    """The rules that the file names."""
    name = pre_tokenizer_name(settings)
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{settings.file.path}: the pre-tokenizer {name!r} is not supported; "
            f"supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
