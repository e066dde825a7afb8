"""Drafts from the request's own text: what followed the last few tokens when they stood there before.

Texts repeat themselves: an answer quotes its prompt, edited code is mostly the old code, lists follow a pattern. No
model is asked, so a guess costs a look into two dictionaries, which are extended by each new token.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request
from chairlift.core.speculation import Wanted

FEW = 16  # tokens up to which indexing one by one is faster than preparing to do it at once
LONG, SHORT = 4, 2  # how many tokens must stand there again; what follows the longer one is the better guess


class NgramProposer:
    """For each request, the place behind the latest occurrence of every run of LONG and of SHORT tokens."""

    name = "ngram"
    max_length = 7
    spent = 0.0  # not worth a look at the clock

    def __init__(self) -> None:
        self._indices: dict[str, _Index] = {}

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        """How many tokens of each request's end were found again; None if nothing was."""
        indices = self._indices
        found: list[int | None] = []
        for request in requests:
            index = indices.get(request.id)
            if index is None:
                index = indices[request.id] = _Index()
            found.append(index.find(request.tokens))
        return found

    def propose(self, wanted: Sequence[Wanted]) -> list[Sequence[int]]:
        """What followed at the places that `foresee` has found."""
        return [self._indices[one.request.id].following(one.request.tokens, one.length) for one in wanted]

    def seconds(self, num_requests: int, length: int) -> float:
        return 0.0  # a few microseconds

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)


class _Index:
    __slots__ = ("_behind_long", "_behind_short", "_num_indexed", "_place")

    def __init__(self) -> None:
        self._behind_long: dict[tuple[int, ...], int] = {}
        self._behind_short: dict[tuple[int, ...], int] = {}
        self._num_indexed = LONG  # runs that end before this position are in the dictionaries
        self._place = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        end = len(tokens)
        if end <= LONG:
            return None
        if self._num_indexed < end:
            self._extend(tokens, end)
        place = self._behind_long.get(tuple(tokens[-LONG:]))
        size = LONG
        if place is None:
            place = self._behind_short.get((tokens[-2], tokens[-1]))
            size = SHORT
            if place is None:
                return None
        self._place = place
        return size

    def _extend(self, tokens: Sequence[int], end: int) -> None:
        """All runs but the one at the very end: nothing is known to follow that."""
        start = self._num_indexed
        if end - start <= FEW:  # as after most steps
            behind_long, behind_short = self._behind_long, self._behind_short
            for place in range(start, end):
                a, b, c, d = tokens[place - LONG : place]
                behind_long[a, b, c, d] = place
                behind_short[c, d] = place
        else:
            recent = tokens[start - LONG : end - 1]
            one, two, three = recent[1:], recent[2:], recent[3:]
            self._behind_long.update(zip(zip(recent, one, two, three, strict=False), range(start, end), strict=False))
            self._behind_short.update(zip(zip(two, three, strict=False), range(start, end), strict=False))
        self._num_indexed = end

    def following(self, tokens: Sequence[int], length: int) -> Sequence[int]:
        found = list(tokens[self._place : self._place + length])
        period = len(tokens) - self._place
        while len(found) < length:  # the text repeats itself right here, and is guessed to go on so
            found.append(found[len(found) - period])
        return found
