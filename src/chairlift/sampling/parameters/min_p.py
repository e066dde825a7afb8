"""min_p: keep tokens that are at least this fraction as likely as the most likely one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.sampling.parameters.base import ProbabilityFilter, column


@SAMPLING_PARAMETERS.register("min_p")
class MinP(ProbabilityFilter):
    order = 30

    @staticmethod
    def floor(weights: Tensor, values: Sequence[float]) -> Tensor:
        return column(values, weights.dtype, weights.device) * weights.amax(dim=-1, keepdim=True)
