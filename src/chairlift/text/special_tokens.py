"""Special tokens spelled out in a message are text, not tokens.

A chat template marks who speaks with special tokens. If a user could write one into a message, he could speak as the
system. So before rendering, such spellings are replaced by marks that no text contains; afterwards the prompt is cut at
the marks, and what they stand for is encoded as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class SpelledTokens:
    """For one conversation: the marks are new every time, so nobody can write one in advance."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._tokens = sorted(special_tokens, key=len, reverse=True)  # of two that fit, the longer
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._spelled = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")
        nonce = secrets.token_hex(8)
        self._mark = f"\ue000{nonce}-%d\ue001"
        self._marks = re.compile(f"\ue000{nonce}-([0-9]+)\ue001")

    def hide(self, value: Any) -> Any:
        """`value` (messages, or a part of them) with every spelling in its strings replaced by a mark."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: self._mark % self._numbers[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The prompt cut at the marks: each piece, and whether it is a spelling that must stay text."""
        for index, piece in enumerate(self._marks.split(rendered)):
            if index % 2:
                yield self._tokens[int(piece)], True
            elif piece:
                yield piece, False
