"""Probability filters for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, Stage
from chairlift.core.sampling.params import SamplingParams
from chairlift.sampling.parameters.base import ProbabilityFilter

Filters: TypeAlias = tuple[tuple[type[ProbabilityFilter], Any], ...]  # filters with the request's parameter values


def filters_of(params: SamplingParams) -> Filters:
    """Return the filters that a request's parameters need."""
    names = params.implementations(Stage.FILTER)
    return tuple((cast(type[ProbabilityFilter], SAMPLING_PARAMETERS.get(name)), params.value(name)) for name in names)


def filter_probabilities(weights: Tensor, filters: Sequence[Filters]) -> None:
    """Zero the probabilities that each row's filters exclude, in place. weights: [R, V], rows sum to 1."""
    kinds: dict[type[ProbabilityFilter], list[tuple[int, Any]]] = {}
    for row, of_row in enumerate(filters):
        for kind, value in of_row:
            kinds.setdefault(kind, []).append((row, value))
    if not kinds:
        return
    floor = torch.zeros(len(weights), 1, device=weights.device)
    has_floor = False
    for kind in sorted(kinds, key=lambda kind: (kind.order, kind.__name__)):
        if kind.sums and has_floor:
            _keep(weights, floor)
        rows, values = zip(*kinds[kind], strict=True)
        if len(rows) == len(weights):
            floor = torch.maximum(floor, kind.floor(weights, values))
        else:
            index = torch.tensor(rows, device=weights.device)
            floor[index] = torch.maximum(floor[index], kind.floor(weights.index_select(0, index), values))
        has_floor = True
    _keep(weights, floor)


def _keep(weights: Tensor, floor: Tensor) -> None:
    """Zero the weights below each row's floor [R, 1]. A mask of floats is several times faster than `where`."""
    kept = torch.empty_like(weights)
    torch.ge(weights, floor, out=kept)
    weights.mul_(kept)
