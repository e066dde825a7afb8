"""Experts on a CPU whose weights stay in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.layers.expert_weights import ExpertWeights
from chairlift.layers.formats.base import ALONE, Fusion, WeightFormat
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.layers.formats.checkpoint import CheckpointWeight
from chairlift.loading.stored_weight import StoredWeight


def keeps_blocks(format: type[WeightFormat], dtype: torch.dtype, device: torch.device) -> bool:
    return format.traits.keeps_stored and not BlockWeight.obstacles(dtype, device)


class BlockExperts(ExpertWeights):
    """A weight of its own for each expert; those that the checkpoint does not store in blocks become plain."""

    def __init__(
        self, num_experts: int, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_experts, out_features, in_features, dtype=dtype, device=device)
        sizes = out_features, in_features, dtype, device
        self._experts: Sequence[WeightFormat] = [CheckpointWeight.empty(*sizes) for _ in range(num_experts)]

    def fill(self, expert: int, first: int, source: Tensor | StoredWeight) -> None:
        self._experts[expert].fill_rows(first, source)

    def finalize(self) -> None:
        self._experts = [weight.finalized() for weight in self._experts]
        self.in_blocks = all(weight.panels is not None for weight in self._experts)

    def multiply(self, expert: int, rows: Tensor, bias: Tensor | None) -> Tensor:
        fusion = ALONE if bias is None else Fusion(bias[expert])
        return self._experts[expert].product(rows, fusion).rows

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._experts)
