"""min_tokens: ban the tokens that end the output until it has this length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.sampling.parameters.base import EditedRow, Ids, LogitsEdit, SampledRequest, flat_index


@SAMPLING_PARAMETERS.register("min_tokens")
class MinTokens(LogitsEdit):
    order = 20

    def __init__(self, request: SampledRequest) -> None:
        params = request.params
        ending = params.stop_ids if params.ignore_eos else (*params.stop_ids, *request.eos_ids)
        banned = sorted({token for token in ending if token < request.vocab_size})
        self._banned: Ids = np.array(banned, np.int64)
        # Structured requests get this from their mask, which still allows an end where the grammar allows nothing else.
        self._until = params.min_tokens if banned and params.structure is None else 0

    def applies(self, position: int) -> bool:
        return position < self._until

    @classmethod
    def edit_rows(cls, logits: Tensor, rows: Sequence[EditedRow[MinTokens]]) -> None:
        index = flat_index(logits, ((row.index, row.edit._banned) for row in rows))
        logits.view(-1).index_fill_(0, index, -torch.inf)
