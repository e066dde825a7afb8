"""Encode special tokens in user text as plain text.

A chat template marks roles with special tokens, so a user message that contains one could start a system message.
Therefore special tokens in messages are replaced by placeholders before rendering. The rendered prompt is then split at
the placeholders, and each special token in its place is encoded as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class SpecialTokenEscaper:
    """Replaces special tokens in the messages of one conversation by random placeholders, which no message can
    contain."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = sorted(special_tokens, key=len, reverse=True)  # longest first: the longest match wins
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._special = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        nonce = secrets.token_hex(8)
        self.end_marker = f"\ue000{nonce}-end\ue001"  # marks the place after which the prompt is cut
        self._placeholder = f"\ue000{nonce}-%d\ue001"
        self._placeholders = re.compile(f"\ue000{nonce}-([0-9]+)\ue001")

    def escape(self, value: Any) -> Any:
        """Return `value` (messages or a part of them) with all special tokens in strings replaced by placeholders."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._placeholder % self._numbers[found[0]], value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(item) for item in value]
        return value

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Split the prompt at the placeholders: yield each piece, and whether it is an escaped special token."""
        for index, piece in enumerate(self._placeholders.split(rendered)):
            if index % 2:
                yield self._tokens[int(piece)], True
            elif piece:
                yield piece, False
