"""How text is split before byte-level BPE, by the name that a GGUF file gives (`tokenizer.ggml.pre`)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.metadata import Metadata

UNNAMED = "default"  # what a file without a name means

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Rules:
    """A table of pre_tokenizers.toml, which explains the fields."""

    steps: tuple[PreTokenizer, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


@cache
def pre_tokenizers() -> dict[str, Rules]:
    """The rules by all their names."""
    tables = tomllib.loads(Path(__file__).with_name("pre_tokenizers.toml").read_text())
    by_name: dict[str, Rules] = {}
    for table in tables.values():
        names, steps = table.pop("names"), tuple(map(_step, table.pop("steps")))
        by_name |= dict.fromkeys(names, Rules(steps, **table))
    return by_name


def _step(step: str | dict[str, Any]) -> PreTokenizer:
    match step:
        case "bytes":
            return ByteLevel(add_prefix_space=False, use_regex=False)
        case "gpt2 words":
            return ByteLevel(add_prefix_space=False, use_regex=True)
        case "digits":
            return Digits(individual_digits=True)
        case "punctuation":
            return Punctuation("contiguous")
        case {"split": pattern}:
            pass
        case {"characters": code_points, "before": before}:  # code points and ranges of them, in hexadecimal
            pattern = before + "[" + "".join(re.sub("[0-9a-f]+", r"\\x{\g<0>}", code_points).split()) + "]+"
        case {"words": digits, **more}:
            line_ends = more.get("line_ends", r"[\r\n]*")
            marks = rf" ?[^\s\p{{L}}\p{{N}}]+{line_ends}" if line_ends else r" ?[^\s\p{L}\p{N}\r\n]+"
            pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{marks}|{_SPACES}"
        case {"cased_words": digits, "contractions": has_contractions}:
            start, suffix = r"[^\r\n\p{L}\p{N}]?", f"{_CONTRACTIONS}?" if has_contractions else ""
            words = rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
            pattern = rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
        case _:
            raise ValueError(f"unknown step {step!r}")
    return Split(Regex(pattern), behavior="isolated")


def pre_tokenizer_name(settings: Metadata) -> str:
    return settings.string("pre") or UNNAMED


def pre_tokenizer_rules(settings: Metadata) -> Rules:
    """The rules that the file names."""
    name, known = pre_tokenizer_name(settings), pre_tokenizers()
    if name not in known:
        raise UnsupportedModel(
            f"{settings.file.path}: the pre-tokenizer {name!r} is not supported; "
            f"supported are {', '.join(sorted(known))}"
        )
    return known[name]
