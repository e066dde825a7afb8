"""How much is in a JSON text, without reading it as JSON."""

from __future__ import annotations

import re

_ESCAPED = re.compile(rb"\\.", re.DOTALL)


class ValueCounter:
    """Counts the values of a JSON text while it arrives, piece by piece: each begins a list or an object or follows a
    comma, outside of strings. To read millions of them takes seconds, during which a server can do nothing else; to
    count those of one piece takes a millisecond."""

    def __init__(self) -> None:
        self.count = 0
        self._in_string = False
        self._escaping = False  # the last piece ended between a backslash and what it escapes

    def take_in(self, piece: bytes) -> None:
        if self._escaping:
            piece = b"\\" + piece
        piece = _ESCAPED.sub(b"", piece)
        self._escaping = piece.endswith(b"\\")
        parts = piece.split(b'"')
        for part in parts[1 if self._in_string else 0 :: 2]:
            self.count += part.count(b",") + part.count(b"[") + part.count(b"{")
        self._in_string ^= len(parts) % 2 == 0
