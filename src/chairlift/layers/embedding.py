"""The token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """A row of the table for every token, scaled if the family does so (Gemma)."""

    def __init__(self, table: Tensor, scale: float, dtype: torch.dtype) -> None:
        self.table = table  # [vocab, hidden], possibly in a smaller type than `dtype`
        self.scale = float(torch.tensor(scale, dtype=dtype))  # rounded to the model's precision, as in training
        self._dtype = dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        x = F.embedding(tokens, self.table).to(self._dtype)
        return x if self.scale == 1.0 else x * self.scale

    def with_squares(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> [T, hidden] and the rows' sums of squares [T, 1], by one kernel of a GPU."""
        from chairlift.kernels.triton.layers import embed

        return embed(tokens, self.table, self.scale)
