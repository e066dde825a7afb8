"""How likely the chosen token was, as the model saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw scores: before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 for the most likely token
    top: tuple[tuple[int, float], ...]  # the most likely tokens, best first
