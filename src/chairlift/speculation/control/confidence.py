"""How often a guess is right of which a network is so sure.

A network gives its guess a probability, but it does not know how well it knows the other one: what it is half sure of
may be right in two cases of three. So guesses are sorted by that probability into a few levels, and each level is
judged by what became of its guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.speculation.control.draft_length import Acceptance

LEVELS = 10
# All levels fade by every verification, and by every time that no guess was sure enough to be verified. So one that had
# bad luck, and whose guesses are left out for it, is tried again when that is forgotten.
_MEMORY = 0.995
_WEIGHT = 4.0  # a network's own word counts like so many guesses


class Confidence:
    def __init__(self) -> None:
        self._levels = [Acceptance() for _ in range(LEVELS)]

    @property
    def chances(self) -> list[float]:
        """Of every level, that a guess is right if those before it are."""
        return [known.chance((level + 0.5) / LEVELS, _WEIGHT) for level, known in enumerate(self._levels)]

    def learn(self, levels: Sequence[int], accepted: int) -> None:
        """The first `accepted` of guesses of these levels were right, and the next one, if there is one, wrong."""
        self.fade()
        for place, level in enumerate(levels[: accepted + 1]):
            self._levels[level].add(1, int(place < accepted), memory=1.0)

    def fade(self) -> None:
        for known in self._levels:
            known.add(0, 0, _MEMORY)
