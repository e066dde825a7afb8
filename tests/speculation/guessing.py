"""Proposers whose guesses are right as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from chairlift.core.request import Request
from chairlift.speculation.control.controller import Wanted

Continue = Callable[[Request, int], Sequence[int]]
"""The next so many tokens that a request would get."""


class Guesser:
    """Right for a random stretch, then wrong; sometimes it has nothing to say, or less than wanted."""

    name = "guesser"
    max_length = 7
    judges = sleeps = asleep = False
    spent = catching_up = 0.0

    def __init__(self, right: Continue, vocab: int = 997, seed: int = 0) -> None:
        self._right = right
        self._vocab = vocab
        self._random = random.Random(seed)

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        return [self._random.choice([0, 0, 1, None]) for _ in requests]

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [self._guess(one) for one in wanted]

    def _guess(self, one: Wanted) -> list[int]:
        length = one.length if self._random.random() < 0.7 else self._random.randint(0, one.length)
        drafts = list(self._right(one.request, length))
        drafts += [self._random.randrange(self._vocab) for _ in range(length - len(drafts))]
        for place in range(self._random.randint(0, length), length):
            drafts[place] = self._random.randrange(self._vocab)
        return drafts

    def seconds(self, num_requests: int, length: int) -> float:
        return 0.0

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass
