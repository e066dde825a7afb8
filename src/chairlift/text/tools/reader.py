"""Parsing of text that arrives in pieces.

The reader's methods are generators that pause (`yield`) when they need more text. So a parser is written as if the
whole text were present, and the text may be split anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_DEPTH = 64  # The depth of JSON; each level is a generator.
SPACES = re.compile(r"[ \t\r\n]*")
NAME = re.compile(r"[a-zA-Z0-9_-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a JSON string except quotes, escapes and control characters
_NUMBER = re.compile(r"[-+.0-9eE]*")
_WORDS = {"t": "true", "f": "false", "n": "null"}


class NotACall(Exception):
    """Text that looked like a call is not one."""


class Reader:
    """A position in a growing text: `text[:at]` has been read but not yet taken."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False  # whether the text is complete

    def take(self) -> str:
        """Remove and return the text that has been read."""
        taken, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return taken

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end."""
        while self.at == len(self.text) and not self.over:
            yield
        return self.text[self.at : self.at + 1]

    def one_of(self, characters: str) -> Reading[str]:
        """Read one character, which must be one of `characters`."""
        character = yield from self.peek()
        if not character or character not in characters:
            raise NotACall
        self.at += 1
        return character

    def literal(self, word: str) -> Reading[None]:
        for character in word:
            yield from self.one_of(character)

    def one_word(self, *words: str) -> Reading[str]:
        """Read one of `words`, of which none is a prefix of another."""
        while True:
            rest = self.text[self.at :]
            found = next((word for word in words if rest.startswith(word)), None)
            if found is not None:
                self.at += len(found)
                return found
            if self.over or not any(word.startswith(rest) for word in words):
                raise NotACall
            yield

    def optional(self, mark: str) -> Reading[bool]:
        """Read `mark` if it comes next, of which the first two characters are enough to tell."""
        while len(self.text) < self.at + 2 and not self.over:
            yield
        if not self.text.startswith(mark[:2], self.at):
            return False
        yield from self.literal(mark)
        return True

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest match of `pattern`, which matches any number of characters of some kind."""
        read = ""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            read += match[0]
            self.at = match.end()
            if self.at < len(self.text) or self.over:
                return read
            yield

    def until(self, marker: str) -> Reading[bool]:
        """Read up to `marker` or the end of the text; returns whether the marker was found."""
        while True:
            found = self.text.find(marker, self.at)
            if found >= 0:
                self.at = found
                return True
            if self.over:
                self.at = len(self.text)
                return False
            self.at = max(self.at, len(self.text) - prefix_at_end(self.text, marker))
            yield

    # ---- JSON ----------------------------------------------------------------------------------------------------

    def value(self, *, repair: bool = False, depth: int = 0) -> Reading[None]:
        """Read a JSON value. `repair` escapes control characters in strings, as JSON requires."""
        first = yield from self.peek()
        if depth > MAX_DEPTH:
            raise NotACall
        if first == '"':
            yield from self.string(repair=repair)
        elif first == "{" or first == "[":
            yield from self._container("}" if first == "{" else "]", repair, depth)
        elif first and first in _WORDS:
            yield from self.literal(_WORDS[first])
        elif first and first in "-0123456789":
            yield from self.run(_NUMBER)
        else:
            raise NotACall

    def _container(self, end: str, repair: bool, depth: int) -> Reading[None]:
        self.at += 1
        yield from self.run(SPACES)
        if (yield from self.peek()) == end:
            self.at += 1
            return
        while True:
            if end == "}":
                yield from self.string(repair=repair)
                yield from self.colon()
            yield from self.value(repair=repair, depth=depth + 1)
            yield from self.run(SPACES)
            if (yield from self.one_of("," + end)) == end:
                return
            yield from self.run(SPACES)

    def colon(self) -> Reading[None]:
        yield from self.run(SPACES)
        yield from self.one_of(":")
        yield from self.run(SPACES)

    def string(self, *, repair: bool = False) -> Reading[None]:
        yield from self.one_of('"')
        while True:
            yield from self.run(_PLAIN)
            character = yield from self.peek()
            if not character:
                raise NotACall
            self.at += 1
            if character == '"':
                return
            if character == "\\":
                if not (yield from self.peek()):
                    raise NotACall
                self.at += 1
            elif repair:
                escape = f"\\u{ord(character):04x}"
                self.text = self.text[: self.at - 1] + escape + self.text[self.at :]
                self.at += len(escape) - 1


def prefix_at_end(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` that `text` ends with."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def first_of(marks: Sequence[str], text: str) -> tuple[str, str | None, str]:
    """Split a text at the first of these marks: the text before it, the mark, and the text behind it.

    Without one: the text that is no part of any, None, and the rest, with which a mark may begin.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    cut = len(text) - max(prefix_at_end(text, mark) for mark in marks)
    return text[:cut], None, text[cut:]
