"""logit_bias: add a number to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.sampling.parameters.base import EditedRow, Ids, LogitsEdit, SampledRequest, Values, flat_index


@SAMPLING_PARAMETERS.register("logit_bias")
class LogitBias(LogitsEdit):
    order = 10

    def __init__(self, request: SampledRequest) -> None:
        bias = request.params.logit_bias or {}
        self._ids: Ids = np.array([*bias], np.int64)
        self._values: Values = np.array([*bias.values()], np.float32)

    @classmethod
    def edit_rows(cls, logits: Tensor, rows: Sequence[EditedRow[LogitBias]]) -> None:
        index = flat_index(logits, ((row.index, row.edit._ids) for row in rows))
        values = np.concatenate([row.edit._values for row in rows])
        logits.view(-1).index_add_(0, index, torch.from_numpy(values).to(logits.device))
