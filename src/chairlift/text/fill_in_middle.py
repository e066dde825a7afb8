"""Prompts for text between a prefix and a suffix, for models that were trained with tokens for it."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.errors import InvalidParameter
from chairlift.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Markers:
    """The tokens before the prefix, before the suffix and before the text to generate."""

    prefix: str
    suffix: str
    middle: str | None  # None: the suffix comes first, and the text follows the prefix


_FAMILIES = [
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Markers("<PRE>", "<SUF>", "<MID>"),
    _Markers("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Markers("[PREFIX]", "[SUFFIX]", None),  # Codestral
]


def encode_fill_in_middle(
    tokenizer: Tokenizer, prefix: str | list[int], suffix: str, *, max_tokens: int | None = None
) -> list[int]:
    """The prompt after which the model generates what belongs between `prefix` and `suffix`."""
    for markers in _FAMILIES:
        start, before_suffix = tokenizer.token_id(markers.prefix), tokenizer.token_id(markers.suffix)
        end = None if markers.middle is None else tokenizer.token_id(markers.middle)
        if start is not None and before_suffix is not None and (end is not None or markers.middle is None):
            break
    else:
        raise InvalidParameter("suffix", "is not supported: the model's tokenizer has no fill-in-the-middle tokens")
    before, after = (
        tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens) if isinstance(text, str) else text
        for text in (prefix, suffix)
    )
    body = [before_suffix, *after, start, *before] if end is None else [start, *before, before_suffix, *after, end]
    return [*tokenizer.first_ids, *body]
