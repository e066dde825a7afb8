"""Prompts for text between a prefix and a suffix, for models that were trained with tokens for it."""

from __future__ import annotations

from collections.abc import Sequence
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


# The tokens before a repository's name and before a file's (Qwen2.5-Coder, StarCoder2, Granite).
_REPOSITORY_MARKERS = [("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>")]
_REPOSITORY, _FILE = "project", "file"  # names for what has none


def can_fill_in_middle(tokenizer: Tokenizer) -> bool:
    return _find_markers(tokenizer) is not None


def _find_markers(tokenizer: Tokenizer) -> tuple[int, int, int | None] | None:
    """The tokens before the prefix, the suffix and the text to generate."""
    for markers in _FAMILIES:
        start, before_suffix = tokenizer.token_id(markers.prefix), tokenizer.token_id(markers.suffix)
        end = None if markers.middle is None else tokenizer.token_id(markers.middle)
        if start is not None and before_suffix is not None and (end is not None or markers.middle is None):
            return start, before_suffix, end
    return None


def encode_fill_in_middle(
    tokenizer: Tokenizer,
    prefix: str | list[int],
    suffix: str,
    *,
    max_tokens: int | None = None,
    extra: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The prompt after which the model generates what belongs between `prefix` and `suffix`.

    `extra` are names and texts of other pieces of code, which come first; those for which `max_tokens` leave no room
    are left out, the first ones before the others.
    """
    markers = _find_markers(tokenizer)
    if markers is None:
        raise InvalidParameter("suffix", "is not supported: the model's tokenizer has no fill-in-the-middle tokens")
    start, before_suffix, end = markers
    before, after = (
        tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens) if isinstance(text, str) else text
        for text in (prefix, suffix)
    )
    body = [before_suffix, *after, start, *before] if end is None else [start, *before, before_suffix, *after, end]
    if extra:
        room = None if max_tokens is None else max_tokens - len(body) - len(tokenizer.first_ids)
        body = [*_encode_extra(tokenizer, extra, room), *body]
    return [*tokenizer.first_ids, *body]


def _encode_extra(tokenizer: Tokenizer, extra: Sequence[tuple[str, str]], room: int | None) -> list[int]:
    """Encode pieces of code: as files of a repository, for models that were trained with tokens for these."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for repository, file in _REPOSITORY_MARKERS:
        repository_id, file_id = tokenizer.token_id(repository), tokenizer.token_id(file)
        if repository_id is not None and file_id is not None:
            first = [repository_id, *encode(f"{_REPOSITORY}\n")]
            last = [file_id, *encode(f"{_FILE}\n")]
            pieces = [[file_id, *encode(f"{name or _FILE}\n{text}")] for name, text in extra]
            break
    else:
        first = last = []
        pieces = [encode(f"{text}\n") for _, text in extra]
    kept: list[list[int]] = []
    left = None if room is None else room - len(first) - len(last)
    for piece in reversed(pieces):
        if left is not None and (left := left - len(piece)) < 0:
            break
        kept.insert(0, piece)
    return [*first, *(token for piece in kept for token in piece), *last] if kept else []
