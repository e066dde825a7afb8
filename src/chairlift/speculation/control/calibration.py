"""Calibrates a draft model's confidence.

A draft model gives each draft token a probability, but its 0.5 may be right in two cases of three. So draft tokens are
sorted by that probability into levels, and the acceptance of each level is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.speculation.control.proposer import LEVELS
from chairlift.speculation.control.tuning import SpeculationTuning


@dataclass(slots=True)
class Acceptance:
    """Draft tokens that were judged (those behind a wrong one are not), and those that were right."""

    judged: int = 0
    right: int = 0


class Calibration:
    """By level of confidence, how often a draft token is right if those before it are."""

    def __init__(self, tuning: SpeculationTuning) -> None:
        self._weight = tuning.level_prior_weight
        self._levels = [Acceptance() for _ in range(LEVELS)]

    @property
    def chances(self) -> list[float]:
        return [
            (known.right + self._weight * (level + 0.5) / LEVELS) / (known.judged + self._weight)
            for level, known in enumerate(self._levels)
        ]

    def learn(self, levels: Sequence[int], accepted: int) -> None:
        """The first `accepted` draft tokens of these levels were right, and the next one, if any, was wrong."""
        for place, level in enumerate(levels[: accepted + 1]):
            self._levels[level].judged += 1
            self._levels[level].right += place < accepted
