"""Drafts from the request's own text: what followed the last few tokens when they stood there before.

Texts repeat themselves: an answer quotes its prompt, edited code is mostly the old code, lists follow a pattern. No
model is asked, so a guess costs a look into a few dictionaries, which are extended by each new token.

Once a place was right it is followed on, for as long as the text goes on as it did there: the longer that has been so,
the likelier it is to last, and the more tokens are worth guessing.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request
from chairlift.speculation.control.controller import Wanted
from chairlift.speculation.control.option import MAX_DRAFTS

FEW = 16  # tokens up to which indexing one by one is faster than preparing to do it at once
MOST_AT_ONCE = 8192  # tokens beyond that are indexed in one step; a request that is not done then gets no drafts yet
LONG, SHORT = 4, 2  # how many tokens must stand there again; what follows the longer one is the better guess
LONGEST = 8  # from here on it makes no difference
KINDS = (None, 1, SHORT, LONG)  # by the bits of how many tokens stand there again


class NgramProposer:
    """For each request, the place behind the latest occurrence of every token and of every run of SHORT and of LONG."""

    name = "ngram"
    max_length = MAX_DRAFTS["ngram"]
    sleeps = asleep = False
    judges = False  # how likely its guesses are, their kind says
    spent = catching_up = 0.0  # not worth a look at the clock

    def __init__(self) -> None:
        self._indices: dict[str, _Index] = {}

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        """How many tokens of each request's end were found again, rounded down to one of KINDS."""
        indices, room = self._indices, MOST_AT_ONCE
        found: list[int | None] = []
        for request in requests:
            index = indices.get(request.id)
            if index is None:
                index = indices[request.id] = _Index()
            tokens = request.tokens
            end = len(tokens)
            missed = end - index.num_indexed
            if missed > FEW:
                count = min(missed, room)
                room -= count
                index.extend_far(tokens, index.num_indexed + count)
                if count < missed:
                    found.append(None)
                    continue
            found.append(index.find(tokens, end))
        return found

    def propose(self, wanted: Sequence[Wanted]) -> list[Sequence[int]]:
        """What followed at the places that `foresee` has found."""
        return [self._indices[one.request.id].following(one.request.tokens, one.length) for one in wanted]

    def seconds(self, num_requests: int, length: int) -> float:
        return 0.0  # a few microseconds

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        pass  # it sees how the text went on

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)


class _Index:
    """Runs are told apart by their hashes, which are half as large as they are. Should two ever have the same, there is
    a wrong guess."""

    __slots__ = ("_behind_long", "_behind_one", "_behind_short", "_end", "_matched", "_place", "num_indexed")

    def __init__(self) -> None:
        self._behind_long: dict[int, int] = {}
        self._behind_short: dict[int, int] = {}
        self._behind_one: dict[int, int] = {}
        self.num_indexed = LONG  # runs that end before this position are in the dictionaries
        self._place = 0  # what stands there is the guess
        self._matched = 0  # tokens before it that are those at the end of the text
        self._end = 0  # of the text, when that was found out

    def find(self, tokens: Sequence[int], end: int) -> int | None:
        """After the few tokens that are new were taken in, too. `end`: how many tokens there are.

        In one piece, for it runs for every request in every step."""
        if end <= LONG:
            return None
        if self.num_indexed < end - 1:
            self._extend(tokens, end - 1)
        before, a, b, c, d = tokens[end - LONG - 1 : end]
        if self.num_indexed < end:  # this is all that there is to take in after most steps
            self._behind_long[hash((before, a, b, c))] = self._behind_short[hash((b, c))] = end - 1
            self._behind_one[c] = end - 1
            self.num_indexed = end
        place, matched = self._place, self._matched
        if matched:  # did the text go on as it did there?
            new = end - self._end
            goes_on = tokens[place] == d if new == 1 else tokens[place : place + new] == tokens[self._end : end]
            place, matched = (place + new, matched + new) if goes_on else (0, 0)
        if matched < LONG:
            found = self._behind_long.get(hash((a, b, c, d)))
            if found is not None:
                place, matched = found, LONG
            elif matched < SHORT:
                found = self._behind_short.get(hash((c, d)))
                if found is not None:
                    place, matched = found, SHORT
                elif not matched:
                    found = self._behind_one.get(d)
                    if found is not None:
                        place, matched = found, 1
        self._place, self._matched, self._end = place, matched, end
        return KINDS[matched.bit_length()] if matched < LONGEST else LONGEST

    def _extend(self, tokens: Sequence[int], end: int) -> None:
        """All runs but the one at the very end of the text: nothing is known to follow that."""
        for place in range(self.num_indexed, end):
            a, b, c, d = tokens[place - LONG : place]
            self._behind_long[hash((a, b, c, d))] = self._behind_short[hash((c, d))] = self._behind_one[d] = place
        self.num_indexed = end

    def extend_far(self, tokens: Sequence[int], end: int) -> None:
        """The same, for many tokens at once."""
        start = self.num_indexed
        if start == end:
            return
        recent = tokens[start - LONG : end - 1]
        one, two, three = recent[1:], recent[2:], recent[3:]
        places = list(range(start, end))  # the same objects for all
        self._behind_long.update(zip(map(hash, zip(recent, one, two, three, strict=False)), places, strict=True))
        self._behind_short.update(zip(map(hash, zip(two, three, strict=False)), places, strict=True))
        self._behind_one.update(zip(three, places, strict=True))
        self.num_indexed = end

    def following(self, tokens: Sequence[int], length: int) -> Sequence[int]:
        found = list(tokens[self._place : self._place + length])
        period = len(tokens) - self._place
        while len(found) < length:  # the text repeats itself right here, and is guessed to go on so
            found.append(found[len(found) - period])
        return found
