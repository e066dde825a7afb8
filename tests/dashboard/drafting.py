"""Speculation for recorded runs."""

from __future__ import annotations

from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.draft_length import FixedLength
from tests.speculation.guessing import Guesser
from tests.speculation.test_rollback import continue_deterministically


def drafting(seed: int) -> SpeculationController:
    return SpeculationController(Guesser(continue_deterministically, seed=seed), FixedLength(4))
