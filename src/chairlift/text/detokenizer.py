"""Incremental detokenization, with the same result as decoding all tokens at once.

A character may be spread over several tokens. Complete characters are emitted at once and the rest is held back, so no
piece contains half a character. The cost per token does not depend on the length of the text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tokenizers import Tokenizer as Backend

from chairlift.errors import UnsupportedModel


def backend_failure(error: BaseException) -> BaseException:
    """Return UnsupportedModel for a failure of the library, such as a regular expression that backtracks too much; an
    interrupt is returned unchanged."""
    return UnsupportedModel(f"the model's tokenizer failed on this text: {error}") if is_failure(error) else error


def is_failure(error: BaseException) -> bool:
    """Whether this is an exception or a Rust panic, which is no `Exception`, rather than an interrupt."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_MAX_PENDING = 16  # maximum number of tokens held back until a character is complete

# Backends with byte fallback write one replacement character for each invalid byte, not one per sequence.
_EACH_BYTE = "chairlift.replace-each-byte"
codecs.register_error(
    _EACH_BYTE,
    lambda error: (REPLACEMENT * (error.end - error.start), error.end),  # type: ignore[attr-defined]
)


class IncrementalDetokenizer(Protocol):
    """Detokenizes one request. The joined pieces equal the backend's decoding of all ids."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes, which may be empty, as in the middle of a character."""
        ...

    def flush(self) -> str:
        """Return the text held back after the last token; an incomplete character becomes U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """The rules of a backend's decoder that works token by token."""

    byte_level: bool = False  # each character of a token stands for one byte
    byte_fallback: bool = False  # tokens such as <0xE2> stand for one byte
    replacements: tuple[tuple[str, str], ...] = ()  # applied to the text of every token
    first_replacements: tuple[tuple[str, str], ...] | None = None  # applied to the first token instead
    strip: tuple[str, int] = (" ", 0)  # (character, maximum number removed from the start)


class TokenPieces:
    """The text of each token, shared by the detokenizers of all requests.

    A piece of `bytes` begins or continues a character; a piece of `str`, as most are, consists of whole characters.
    """

    def __init__(self, backend: Backend, rules: DecodingRules) -> None:
        self.rules = rules
        self._backend = backend
        self._pieces: dict[int, bytes | str | None] = {}

    def piece(self, token_id: int) -> bytes | str | None:
        """Return the piece of a token; None for an unknown id, since models often pad their vocabulary."""
        try:
            return self._pieces[token_id]
        except KeyError:
            return self._pieces.setdefault(token_id, self._make(token_id, self.rules.replacements))

    def first_piece(self, token_id: int) -> bytes | str | None:
        if self.rules.first_replacements is None:
            return self.piece(token_id)
        return self._make(token_id, self.rules.first_replacements)

    def _make(self, token_id: int, replacements: tuple[tuple[str, str], ...]) -> bytes | str | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self.rules.byte_level:
            # An added token with characters that encode no byte is literal text.
            known = all(character in _BYTE_OF for character in token)
            return _as_text(bytes(_BYTE_OF[character] for character in token)) if known else token
        if self.rules.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token


def _as_text(raw: bytes) -> bytes | str:
    """Decode bytes that are whole characters, which neighbouring tokens cannot change; return others unchanged."""
    try:
        return raw.decode() or raw
    except UnicodeDecodeError:
        return raw


class PieceDetokenizer:
    """For decoders that work token by token: byte-level BPE and SentencePiece."""

    def __init__(self, pieces: TokenPieces, skip: Set[int], *, verbatim: bool = False) -> None:
        self._pieces = pieces
        self._skip = skip
        errors = "replace" if pieces.rules.byte_level else _EACH_BYTE
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._in_character = False  # whether the decoder may hold an incomplete character
        self._first = not verbatim
        self._strip, self._strips_left = (" ", 0) if verbatim else pieces.rules.strip

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        piece = self._pieces.first_piece(token_id) if self._first else self._pieces.piece(token_id)
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            self._in_character = True
            piece = self._utf8.decode(piece)
        elif self._in_character:
            self._in_character = False
            piece = self._utf8.decode(b"", final=True) + piece
        return self._stripped(piece) if self._strips_left else piece

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while text and self._strips_left:
            if text[0] != self._strip:
                self._strips_left = 0
            else:
                text = text[1:]
                self._strips_left -= 1
        return text


class WindowDetokenizer:
    """For any other decoder (WordPiece, CTC, …): decode the last few tokens again and emit the new text.

    The preceding tokens are decoded again because they may determine a space before the new text.
    """

    def __init__(self, backend: Backend, skip: Set[int]) -> None:
        self._backend = backend
        self._skip = skip
        self._before: list[int] = []  # tokens of the text emitted last
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skip or self._backend.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        unfinished = not text or text.endswith(REPLACEMENT)
        if unfinished and len(self._pending) < _MAX_PENDING:
            return ""
        self._before, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._pending = []
        return text

    def _new_text(self) -> str:
        return self._decode(self._before + self._pending)[len(self._decode(self._before)) :]

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            raise backend_failure(error) from None


def decoding_rules(backend: Backend) -> DecodingRules | None:
    """Return the rules of the backend's decoder, or None if it needs more than one token at a time."""
    if backend.decoder is None:
        return None
    # The pickled state is the decoder's JSON; `to_str()` would also serialise the whole vocabulary.
    decoder = json.loads(cast(bytes, backend.decoder.__getstate__()))
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return DecodingRules(byte_level=True)
    if names == ["Metaspace"]:
        space, prepends = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
        return DecodingRules(replacements=((space, " "),), first_replacements=((space, ""),) if prepends else None)
    return _sentencepiece_rules(steps, names)


def _sentencepiece_rules(steps: list[dict[str, Any]], names: list[str]) -> DecodingRules | None:
    """Return the rules of the steps Replace…, ByteFallback, Fuse, Strip in this order, each of which may be absent."""
    count = names.count("Replace")
    replaces, rest = steps[:count], names[count:]
    shapes = [["ByteFallback"], ["Fuse"], ["ByteFallback", "Fuse"], ["Fuse", "Strip"]]
    if rest not in [*shapes, ["ByteFallback", "Fuse", "Strip"]]:
        return None
    if any("String" not in step["pattern"] for step in replaces):
        return None
    strip = (" ", 0)
    if rest[-1] == "Strip":
        if steps[-1]["stop"]:
            return None
        strip = (steps[-1]["content"], steps[-1]["start"])
    return DecodingRules(
        byte_fallback="ByteFallback" in rest,
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in replaces),
        strip=strip,
    )


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: printable bytes stand for themselves, others are from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
