"""The token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.linear import Build


class Embedding:
    """A row of the table for every token, scaled if the family does so (Gemma)."""

    weight: WeightFormat | None = None  # It is read in the place of the table.

    def __init__(self, table: Tensor, scale: float, dtype: torch.dtype) -> None:
        self.table = table  # [vocab, hidden], possibly in a smaller type than `dtype`
        self.scale = float(torch.tensor(scale, dtype=dtype))  # rounded to the model's precision, as in training
        self._dtype = dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        if on_gpu(tokens.device) and self.table.dtype is self._dtype:
            return self.with_squares(tokens)[0]
        return self._scale_rows(tokens)

    def _scale_rows(self, tokens: Tensor) -> Tensor:
        x = self._rows(tokens).to(self._dtype)
        return x if self.scale == 1.0 else x * self.scale

    def _rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    def with_squares(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> [T, hidden] and the rows' sums of squares [T, 1], by one kernel of a GPU."""
        from chairlift.kernels.triton.layers import embed

        return embed(tokens, self.table, self.scale)


class StoredEmbedding(Embedding):
    """A table that may stay in the form of its checkpoint; a tied head multiplies with the same weight."""

    def __init__(self, weight: WeightFormat, scale: float, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(0), scale, dtype)
        self.weight = weight
        weight.looked_up = True

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._scale_rows(tokens)

    def _rows(self, tokens: Tensor) -> Tensor:
        assert self.weight is not None
        return self.weight.rows(tokens)

    @property
    def num_bytes(self) -> int:
        assert self.weight is not None
        return self.weight.num_bytes


def empty_embedding(vocab_size: int, hidden_size: int, scale: float, build: Build) -> Embedding:
    """A table to be filled; in formats that keep the blocks of a file, it may stay in those."""
    format, dtype, device = build.format, build.dtype, build.device
    if format.traits.becomes_blocks(dtype, device):
        return StoredEmbedding(format.empty(vocab_size, hidden_size, dtype, device), scale, dtype)
    return Embedding(build.empty(vocab_size, hidden_size), scale, dtype)
