"""top_a: keep tokens whose probability is at least this multiple of the highest probability squared."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, SamplingParameter, Stage, number
from chairlift.sampling.parameters.base import ProbabilityFilter, column


@SAMPLING_PARAMETERS.register("top_a")
class TopA(ProbabilityFilter):
    declaration = SamplingParameter(neutral=0.0, check=number(0.0, 1.0), stage=Stage.FILTER)

    @staticmethod
    def floor(weights: Tensor, values: Sequence[float]) -> Tensor:
        return column(values, weights.dtype, weights.device) * weights.amax(dim=-1, keepdim=True) ** 2
