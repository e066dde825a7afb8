"""Speculation for recorded runs."""

from __future__ import annotations

from chairlift.speculation.control.controller import SpeculationController
from tests.speculation.drafting import RandomProposer, continue_deterministically, fixed_length


def drafting(seed: int) -> SpeculationController:
    return fixed_length(RandomProposer(continue_deterministically, seed=seed), 4)
