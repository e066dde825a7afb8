"""Evaluates a draft head by what it is for: tokens per step of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

USUAL_DRAFT_LENGTH = 3  # as many draft tokens as pay at most positions


@dataclass(frozen=True, slots=True)
class DraftAccuracy:
    everywhere: float  # share of first draft tokens that are right, over all positions of the answers
    by_place: tuple[float, ...]  # the same for each place of the drafts that would be made, after right ones only
    tokens_per_step: float

    def __str__(self) -> str:
        places = ", ".join(f"{share:.1%}" for share in self.by_place)
        drafted = f"right where drafted {places}: {self.tokens_per_step:.3f} tokens per step"
        return f"{drafted}; right at all positions {self.everywhere:.1%}"


def evaluate(answers: Sequence[tuple[Tensor, Tensor]], draft_length: int = USUAL_DRAFT_LENGTH) -> DraftAccuracy:
    """The accuracy on greedy texts, as they would have been generated with drafts.

    answers: parts of the texts, each as hits [depths, texts, length] (whether the draft token of that depth at that
    position is the target's next token) and written [texts, length].

    A step begins where the one before it ended, which is behind a token that the draft missed. Missed tokens come in
    clusters, so the drafts that are made are right less often than drafts at all positions would be.
    """
    everywhere = torch.zeros(2)
    drafted, right = torch.zeros(draft_length), torch.zeros(draft_length)
    steps = tokens = 0
    for hits, written in answers:
        hits, written = hits.cpu() & written.cpu(), written.cpu()
        everywhere += torch.tensor([hits[0].sum(), written.sum()])
        accepted = _accepted_lengths(hits, draft_length)
        begins = torch.zeros(len(written), dtype=torch.long)  # of each text: the position where its next step begins
        for position in range(written.shape[1]):
            now = written[:, position] & (begins <= position)
            found = accepted[now, position]
            steps += len(found)
            tokens += int((found + 1).sum())
            for depth in range(draft_length):
                drafted[depth] += (found >= depth).sum()
                right[depth] += (found > depth).sum()
            begins[now] = position + 1 + found
    shares = (right / drafted.clamp(min=1)).tolist()
    return DraftAccuracy(float(everywhere[0] / everywhere[1].clamp(min=1)), tuple(shares), tokens / max(1, steps))


def _accepted_lengths(hits: Tensor, draft_length: int) -> Tensor:
    """[texts, length]: how many draft tokens of a step that begins there are right, up to the first wrong one."""
    length = hits.shape[2]
    accepted, all_right = torch.zeros(hits.shape[1:], dtype=torch.long), torch.ones(hits.shape[1:], dtype=torch.bool)
    for depth in range(min(draft_length, length)):
        right = torch.zeros_like(all_right)
        right[:, : length - depth] = hits[depth, :, depth:]
        all_right = all_right & right
        accepted += all_right
    return accepted
