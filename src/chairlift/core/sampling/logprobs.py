"""Log-probabilities of a sampled token and of its alternatives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model at one position, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token: one more than the number of tokens that are strictly more likely."""
    top: tuple[tuple[int, float], ...]
    """The n most likely (token id, logprob), most likely first; ties in the order of their ids."""
