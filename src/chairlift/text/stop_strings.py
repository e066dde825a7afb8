"""Find stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on and holds back what may become a stop string.

    The stop string that is complete first wins; among those that end at the same character, the longest. The result
    does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that can be shown, and the stop string if one is complete.

        With a match, the text ends before the stop string, or after it with `include`; later text is dropped.
        """
        if not self._searches:
            return text, None
        if self._found is not None:
            return "", self._found
        start = len(self._held)
        text = self._held + text
        for end, character in enumerate(text[start:], start + 1):
            complete = [search.pattern for search in self._searches if search.advance(character)]
            if complete:
                self._found = max(complete, key=len)
                self._held = ""
                return text[: end if self._include else end - len(self._found)], self._found
        held = max((search.matched for search in self._searches), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Return the text held back after the last piece."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Searches a text for one pattern, character by character (Knuth, Morris and Pratt).

    `matched` is the length of the longest prefix of the pattern that ends the text, which must be held back.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        # For each prefix of the pattern, the length of the longest shorter prefix that it ends with.
        self._shorter = [0]
        for character in pattern[1:]:
            self._shorter.append(_extend(pattern, self._shorter, self._shorter[-1], character))

    def advance(self, character: str) -> bool:
        """Read one character; return whether it completes the pattern, after which this must not be called."""
        self.matched = _extend(self.pattern, self._shorter, self.matched, character)
        return self.matched == len(self.pattern)


def _extend(pattern: str, shorter: Sequence[int], matched: int, character: str) -> int:
    while matched and pattern[matched] != character:
        matched = shorter[matched - 1]
    return matched + (pattern[matched] == character)
