"""The sampling parameters that exclude tokens by their probability: top_k, top_p and min_p."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.sampling.parameters.base import ProbabilityFilter, column

NUCLEUS_CANDIDATES = 1024
ROWS_SORTED_AT_ONCE = 32  # a sort takes several times the memory of its input


@SAMPLING_PARAMETERS.register("top_k")
class TopK(ProbabilityFilter):
    """Keeps the k most likely tokens."""

    order = 10

    @staticmethod
    def floor(weights: Tensor, values: Sequence[int]) -> Tensor:
        vocab = weights.shape[1]
        largest = max((k for k in values if k < vocab), default=None)
        if largest is None:
            return weights.new_zeros(len(values), 1)
        limits = column([min(k, largest) for k in values], torch.int64, weights.device)
        floor = weights.topk(largest).values.gather(1, limits - 1)
        return floor.where(column(values, torch.int64, weights.device) < vocab, 0.0)


@SAMPLING_PARAMETERS.register("top_p")
class TopP(ProbabilityFilter):
    """Keeps the smallest set of most likely tokens (the nucleus) that holds this share of the probability."""

    order = 20
    sums = True

    @staticmethod
    def floor(weights: Tensor, values: Sequence[float]) -> Tensor:
        shares = column(values, torch.float64, weights.device)
        return nucleus_floor_by_row(weights, shares) if weights.device.type == "cpu" else nucleus_floor(weights, shares)


@SAMPLING_PARAMETERS.register("min_p")
class MinP(ProbabilityFilter):
    """Keeps tokens that are at least this fraction as likely as the most likely one."""

    order = 30

    @staticmethod
    def floor(weights: Tensor, values: Sequence[float]) -> Tensor:
        return column(values, weights.dtype, weights.device) * weights.amax(dim=-1, keepdim=True)


def nucleus_floor_by_row(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest weight [R, 1] in each row's nucleus. For the CPU: sort only candidates, since sorting
    dominates.

    Tokens lighter than (1 - top_p) / V of the total are not candidates: their sum is less than 1 - top_p.
    """
    floors = np.zeros(len(weights), dtype=np.float32)
    for row, (values, share) in enumerate(zip(weights.numpy(), top_p[:, 0].tolist(), strict=True)):
        total = float(values.sum())
        candidates = values[np.flatnonzero(values >= np.float32((1.0 - share) * total / len(values)))]
        if len(candidates):  # a row of NaN has none
            candidates[::-1].sort()  # heaviest first
            mass = np.cumsum(candidates, dtype=np.float64)
            last = min(int(np.searchsorted(mass, share * total)), len(candidates) - 1)
            floors[row] = candidates[last]
    return torch.from_numpy(floors)[:, None]


def nucleus_floor(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest weight [R, 1] in each row's nucleus. For a GPU: the heaviest tokens contain the nucleus of
    nearly every row; only the other rows are fully sorted."""
    target = top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    heaviest = weights.topk(min(NUCLEUS_CANDIDATES, weights.shape[1])).values
    floor, complete = _floor_among(heaviest, target)
    (wide,) = (~complete).nonzero(as_tuple=True)
    for rows in wide.split(ROWS_SORTED_AT_ONCE) if len(wide) else ():
        whole = weights[rows].sort(dim=-1, descending=True).values
        floor[rows], _ = _floor_among(whole, target[rows])
    return floor


def _floor_among(heaviest: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight [R, 1] at which the running sum reaches the target, and whether [R] it does."""
    mass = heaviest.cumsum(dim=-1, dtype=torch.float64)
    last = (mass < target).sum(dim=-1, keepdim=True).clamp_(max=heaviest.shape[1] - 1)
    return heaviest.gather(1, last), mass[:, -1] >= target[:, 0]
