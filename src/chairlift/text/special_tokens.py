"""Special tokens in user text are encoded as text.

A chat template marks roles with special tokens. If a user message could contain one, it could begin a message of the
system role. So before rendering, the special tokens in messages are replaced by placeholders that no text contains;
afterwards the prompt is cut at the placeholders, and the special tokens in their place are encoded as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class SpecialTokenEscaper:
    """Hides the special tokens in the messages of one conversation behind placeholders, which are random so that no
    message can contain one."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = sorted(special_tokens, key=len, reverse=True)  # of two that match, the longer
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._special = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        nonce = secrets.token_hex(8)
        self._placeholder = f"\ue000{nonce}-%d\ue001"
        self._placeholders = re.compile(f"\ue000{nonce}-([0-9]+)\ue001")

    def escape(self, value: Any) -> Any:
        """`value` (messages, or a part of them) with every special token in its strings replaced by a placeholder."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._placeholder % self._numbers[found[0]], value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(item) for item in value]
        return value

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The prompt cut at the placeholders: each piece, and whether it is a special token that must stay text."""
        for index, piece in enumerate(self._placeholders.split(rendered)):
            if index % 2:
                yield self._tokens[int(piece)], True
            elif piece:
                yield piece, False
