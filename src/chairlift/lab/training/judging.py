"""What guesses are worth in the end: tokens per step of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

USUAL_GUESSES = 3  # of a step: as many as pay at most places


@dataclass(frozen=True, slots=True)
class Verdict:
    everywhere: float  # the share of right first guesses, at all places of the answers
    by_place: tuple[float, ...]  # where they are asked for: each guess of a step behind right ones
    tokens_per_step: float

    def __str__(self) -> str:
        places = ", ".join(f"{share:.1%}" for share in self.by_place)
        asked = f"right where asked {places}: {self.tokens_per_step:.3f} tokens per step"
        return f"{asked}; right at all places {self.everywhere:.1%}"


def judge(answers: Sequence[tuple[Tensor, Tensor]], guesses: int = USUAL_GUESSES) -> Verdict:
    """From the likeliest texts, as they would have been written with guesses.

    answers: parts of the texts, each as hits [depths, texts, length] (whether the guess of that depth at that place was
    what the target said next) and written [texts, length].

    Wherever a step ends, the next one begins. It ends behind a token that nobody foresaw, and those come where more of
    them come: so the guesses that are asked for are right less often than guesses at all places would be.
    """
    everywhere = torch.zeros(2)
    asked, right = torch.zeros(guesses), torch.zeros(guesses)
    steps = tokens = 0
    for hits, written in answers:
        hits, written = hits.cpu() & written.cpu(), written.cpu()
        everywhere += torch.tensor([hits[0].sum(), written.sum()])
        runs = _runs(hits, guesses)
        begins = torch.zeros(len(written), dtype=torch.long)  # the place of each text where its next step begins
        for place in range(written.shape[1]):
            now = written[:, place] & (begins <= place)
            found = runs[now, place]
            steps += len(found)
            tokens += int((found + 1).sum())
            for depth in range(guesses):
                asked[depth] += (found >= depth).sum()
                right[depth] += (found > depth).sum()
            begins[now] = place + 1 + found
    shares = (right / asked.clamp(min=1)).tolist()
    return Verdict(float(everywhere[0] / everywhere[1].clamp(min=1)), tuple(shares), tokens / max(1, steps))


def _runs(hits: Tensor, guesses: int) -> Tensor:
    """[texts, length]: how many guesses of a step that begins there would be right, up to the first wrong one."""
    length = hits.shape[2]
    runs, going = torch.zeros(hits.shape[1:], dtype=torch.long), torch.ones(hits.shape[1:], dtype=torch.bool)
    for depth in range(min(guesses, length)):
        there = torch.zeros_like(going)
        there[:, : length - depth] = hits[depth, :, depth:]
        going = going & there
        runs += going
    return runs
