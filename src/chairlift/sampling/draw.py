"""From logits to one token per row: the arg max, the filters, and the draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from chairlift.core.plan import BAD_LOGITS
from chairlift.core.sampling_params import SamplingParams

MAX_BLOCK = 512
NUCLEUS_CANDIDATES = 1024
SORTED_AT_ONCE = 32  # rows: a sort takes several times the memory of what it sorts


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row [S], the lowest id where several tie; BAD_LOGITS where it is not finite."""
    tokens = _argmax(logits)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens.where(chosen.isfinite(), BAD_LOGITS)


def _argmax(logits: Tensor) -> Tensor:
    """The first highest value of each row; a NaN counts as higher than any number, so it shows."""
    if logits.device.type == "cpu":
        # torch's CPU arg max is not vectorised: numpy's is about ten times faster.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def filter_weights(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Zero the probabilities that top-k, top-p and min-p exclude, in place. weights: [R, V], rows sum to 1.

    Each filter is a floor under the probability of a row. So tokens that tie at the floor stay or go together,
    and no order among equals is invented.
    """
    vocab = weights.shape[1]
    top_k = [(row, p.top_k) for row, p in enumerate(params) if 0 < p.top_k < vocab]
    top_p = [(row, p.top_p) for row, p in enumerate(params) if p.top_p < 1.0]
    min_p = [p.min_p for p in params]

    floor = torch.zeros(len(params), 1, device=weights.device)
    if top_k:
        rows, limits = _columns(top_k, torch.int64, weights.device)
        floor[rows] = _rows(weights, rows).topk(int(max(k for _, k in top_k))).values.gather(1, limits - 1)
    if top_k and top_p:
        _keep(weights, floor)  # top-p counts the mass that top-k left
    if top_p:
        rows, masses = _columns(top_p, torch.float64, weights.device)
        floor[rows] = nucleus_floor(_rows(weights, rows), masses)
    if any(min_p):
        share = torch.tensor(min_p, device=weights.device)[:, None]
        floor = torch.maximum(floor, share * weights.amax(dim=-1, keepdim=True))
    if top_k or top_p or any(min_p):
        _keep(weights, floor)


def nucleus_floor(weights: Tensor, top_p: Tensor) -> Tensor:
    """The lowest weight [R, 1] in the smallest set of likeliest tokens that holds the share top_p [R, 1]."""
    if weights.device.type == "cpu":
        return _nucleus_floor_by_row(weights, top_p)
    return _nucleus_floor_batched(weights, top_p)


def _nucleus_floor_by_row(weights: Tensor, top_p: Tensor) -> Tensor:
    """For the CPU, where sorting is what costs: sort only tokens that can be in the nucleus.

    Tokens lighter than (1 - top_p) / V of the total cannot: all of them together weigh less than 1 - top_p.
    """
    floors = np.zeros(len(weights), dtype=np.float32)
    for row, (values, share) in enumerate(zip(weights.numpy(), top_p[:, 0].tolist(), strict=True)):
        total = float(values.sum())
        candidates = values[np.flatnonzero(values >= np.float32((1.0 - share) * total / len(values)))]
        if len(candidates):  # none in a row of NaN
            candidates[::-1].sort()  # heaviest first
            mass = np.cumsum(candidates, dtype=np.float64)
            last = min(int(np.searchsorted(mass, share * total)), len(candidates) - 1)
            floors[row] = candidates[last]
    return torch.from_numpy(floors)[:, None]


def _nucleus_floor_batched(weights: Tensor, top_p: Tensor) -> Tensor:
    """For a GPU: the heaviest tokens hold the nucleus of nearly every row; only the others are sorted whole."""
    target = top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    heaviest = weights.topk(min(NUCLEUS_CANDIDATES, weights.shape[1])).values
    floor, enough = _floor_among(heaviest, target)
    (wide,) = (~enough).nonzero(as_tuple=True)
    for some in wide.split(SORTED_AT_ONCE) if len(wide) else ():
        whole = weights[some].sort(dim=-1, descending=True).values
        floor[some], _ = _floor_among(whole, target[some])
    return floor


def _floor_among(heaviest: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The weight [R, 1] at which the running sum reaches the target, and whether [R] it does."""
    mass = heaviest.cumsum(dim=-1, dtype=torch.float64)
    last = (mass < target).sum(dim=-1, keepdim=True).clamp_(max=heaviest.shape[1] - 1)
    return heaviest.gather(1, last), mass[:, -1] >= target[:, 0]


def draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """One token per row [R] by inverting the cumulative weights, in vocabulary order, at each row's uniform.

    In two levels, so that no cumulative sum over the whole vocabulary is needed: first the block of tokens,
    then the token in it. BAD_LOGITS where the weights of a row have no positive sum.
    """
    rows, vocab = weights.shape
    blocks = weights.view(rows, -1, _block_size(vocab))
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * total
    block, before = _first_above(cumulative, target)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]]
    token, _ = _first_above(inside.cumsum(dim=-1, dtype=torch.float64), target - before)
    tokens = block * blocks.shape[2] + token
    return tokens.where(total > 0, BAD_LOGITS).squeeze(1)


def draw_or_accept(
    weights: Tensor, uniforms: Sequence[float], guesses: Sequence[int], guessed_from: Tensor, chances: Sequence[float]
) -> Tensor:
    """One token per row [R], distributed as `weights` say, though each guess was drawn from `guessed_from` [R, V].

    A guess is kept with the probability weight / weight that it was drawn with, at most 1. Otherwise the token is drawn
    from what the weights exceed the others by: just as much as the guesses left out (Leviathan, Kalman and Matias,
    2023). guessed_from sums to 1 in every row. The weights are changed.
    """
    weights /= weights.sum(dim=-1, keepdim=True)
    guess = torch.tensor(guesses, device=weights.device)[:, None]
    chance = torch.tensor(chances, dtype=weights.dtype, device=weights.device)[:, None]
    kept = chance * guessed_from.gather(1, guess) < weights.gather(1, guess)
    rest = (weights - guessed_from).clamp_(min=0)
    none_left = rest.sum(dim=-1, keepdim=True) <= 0  # the two are equal but for rounding
    return guess.squeeze(1).where(kept.squeeze(1), draw(rest.where(~none_left, weights), uniforms))


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row first exceeds its target, and the sum before that place. All [R, 1].

    The target is kept below the row's total, so that rounding never leads past the end, and the sum grows at
    the place found, so that a token of weight zero is never drawn.
    """
    end = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    place = (cumulative <= target).sum(dim=-1, keepdim=True)
    before = cumulative.gather(1, (place - 1).clamp_(min=0)).where(place > 0, 0.0)
    return place, before


@cache
def _block_size(vocab: int) -> int:
    """The largest divisor of the vocabulary that makes a block: no row needs padding."""
    return max(size for size in range(1, min(vocab, MAX_BLOCK) + 1) if vocab % size == 0)


def _keep(weights: Tensor, floor: Tensor) -> None:
    """Zero the weights below each row's floor [R, 1]. A mask of floats: several times faster than `where`."""
    kept = torch.empty_like(weights)
    torch.ge(weights, floor, out=kept)
    weights.mul_(kept)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, rows)


def _columns(pairs: Sequence[tuple[int, float]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, value) pairs as an index [N] and a column [N, 1]."""
    rows, values = zip(*pairs, strict=True)
    return torch.tensor(rows, device=device), torch.tensor(values, dtype=dtype, device=device)[:, None]
