"""`ngram`: draft tokens from the request's own text, copied from behind an earlier occurrence of its last tokens.

Texts repeat themselves: an answer quotes its prompt, edited code is mostly the old code, lists follow a pattern. No
model is run: a draft costs lookups in a few dictionaries, which are extended by each new token.

A match is followed for as long as the text goes on as it did there. The longer it has lasted, the likelier it is to
last, and the more tokens are worth drafting.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import Draft, DraftTerms, StandaloneProposer

FEW = 16  # new tokens up to which indexing one by one is faster than in bulk
MOST_AT_ONCE = 8192  # further tokens that are indexed in one step; a request that is not done then gets no draft yet
MOST_AHEAD = 512  # A request may have these indexed while steps are queued ahead of the device: 0.4 ms.
LONG, SHORT = 4, 2  # tokens of an n-gram; what follows the longer one is the better draft
# Bits of the number of matched tokens -> level of confidence. On the bench's texts that quote their prompt, the next
# token is right in 20, 57, 78 and 96 cases of 100.
LEVEL_BY_BITS = (None, 1, 5, 7, 9)


@PROPOSERS.register("ngram")
class NgramProposer(StandaloneProposer):
    """Keeps, for each request, the position behind the latest occurrence of every token and of every n-gram."""

    name = "ngram"
    max_length = 15  # Together with the last known token, attention still treats them as a decode.

    def __init__(self, argument: str = "") -> None:
        super().__init__(argument)
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        room = MOST_AT_ONCE
        for request in requests:
            index = self._index(request)
            room -= index.catch_up(request, room)
            level = index.find(request.tokens) if request.num_known - index.num_indexed <= FEW else None
            if level is None:
                drafts.append(None)
                continue
            length = terms.length(request)
            drafts.append(Draft(index.following(request.tokens, length), [level] * length))
        return drafts

    def expected_level(self, request: Request) -> int | None:
        index = self._index(request)
        index.catch_up(request, MOST_AHEAD)
        return index.find(request.tokens) if request.num_known - index.num_indexed <= FEW else None

    def _index(self, request: Request) -> NgramIndex:
        index = self._indices.get(request.id)
        if index is None:
            index = self._indices[request.id] = NgramIndex()
        return index

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)


class NgramIndex:
    """The n-grams of one request. Their hashes are the keys, at half the memory; a collision is a wrong draft."""

    __slots__ = ("_behind_long", "_behind_one", "_behind_short", "_end", "_matched", "_position", "num_indexed")

    def __init__(self) -> None:
        self._behind_long: dict[int, int] = {}
        self._behind_short: dict[int, int] = {}
        self._behind_one: dict[int, int] = {}
        self.num_indexed = LONG  # n-grams that end before this position are in the dictionaries
        self._position = 0  # the draft starts there
        self._matched = 0  # tokens before it that equal those at the end of the text
        self._end = 0  # length of the text at the last call of `find`

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index the new tokens, look for the end of the text, and return the level of confidence in what follows.

        One function, because it runs for every request in every step."""
        end = len(tokens)
        if end <= LONG:
            return None
        if self.num_indexed < end - 1:
            self._extend(tokens, end - 1)
        before, a, b, c, d = tokens[end - LONG - 1 : end]
        if self.num_indexed < end:  # This is the only new position in most steps.
            self._behind_long[hash((before, a, b, c))] = self._behind_short[hash((b, c))] = end - 1
            self._behind_one[c] = end - 1
            self.num_indexed = end
        position, matched = self._position, self._matched
        if matched:  # does the text still go on as it did there?
            new = end - self._end
            same = tokens[position] == d if new == 1 else tokens[position : position + new] == tokens[self._end : end]
            position, matched = (position + new, matched + new) if same else (0, 0)
        if matched < LONG:
            match = self._behind_long.get(hash((a, b, c, d)))
            if match is not None:
                position, matched = match, LONG
            elif matched < SHORT:
                match = self._behind_short.get(hash((c, d)))
                if match is not None:
                    position, matched = match, SHORT
                elif not matched:
                    match = self._behind_one.get(d)
                    if match is not None:
                        position, matched = match, 1
        self._position, self._matched, self._end = position, matched, end
        return LEVEL_BY_BITS[min(matched.bit_length(), 4)]

    def catch_up(self, request: Request, most: int) -> int:
        """Index many new tokens, such as those of a prompt; return how many."""
        missed = request.num_known - self.num_indexed
        if missed <= FEW:
            return 0
        count = min(missed, most)
        self.extend_in_bulk(request.tokens, self.num_indexed + count)
        return count

    def _extend(self, tokens: Sequence[int], end: int) -> None:
        """Index all n-grams but the one at the very end, whose successor is unknown."""
        for position in range(self.num_indexed, end):
            a, b, c, d = tokens[position - LONG : position]
            self._behind_long[hash((a, b, c, d))] = self._behind_short[hash((c, d))] = position
            self._behind_one[d] = position
        self.num_indexed = end

    def extend_in_bulk(self, tokens: Sequence[int], end: int) -> None:
        """The same for many tokens at once."""
        start = self.num_indexed
        if start == end:
            return
        recent = tokens[start - LONG : end - 1]
        first, second, third = recent[1:], recent[2:], recent[3:]
        positions = list(range(start, end))  # one int object for all three dictionaries
        self._behind_long.update(
            zip(map(hash, zip(recent, first, second, third, strict=False)), positions, strict=True)
        )
        self._behind_short.update(zip(map(hash, zip(second, third, strict=False)), positions, strict=True))
        self._behind_one.update(zip(third, positions, strict=True))
        self.num_indexed = end

    def following(self, tokens: Sequence[int], length: int) -> list[int]:
        following = list(tokens[self._position : self._position + length])
        period = len(tokens) - self._position
        while len(following) < length:  # the match overlaps the end: the text repeats itself with this period
            following.append(following[len(following) - period])
        return following
