"""top_k: keep the k most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.sampling.parameters.base import ProbabilityFilter, column


@SAMPLING_PARAMETERS.register("top_k")
class TopK(ProbabilityFilter):
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
