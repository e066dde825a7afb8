"""BLOOM: ALiBi instead of positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import AttentionAdapter


@ADAPTERS.register("bloom")
class BloomAdapter(AttentionAdapter):
    attention_class = "BloomAttention"
    takes_positions = False
    length_fields = ("seq_length", "n_positions")
    default_length = 2048  # The published models have it; ALiBi has no limit of its own.

    def replace(self, module: Any, index: int) -> None:
        slopes = alibi_slopes(module.num_heads)

        def forward(hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            _, rows, size = hidden_states.shape
            fused = module.query_key_value(hidden_states).view(1, rows, module.num_heads, 3, module.head_dim)
            q, k, v = fused.permute(3, 0, 2, 1, 4)
            bias = self.positions[:, None] * slopes.to(self.positions.device)
            output = self.attend(index, q, k, v, scale=module.inv_norm_factor, bias=bias)
            return module.dense(output.reshape(1, rows, size)) + residual, None

        module.forward = forward


def alibi_slopes(num_heads: int) -> Tensor:
    """[heads] float32: what a head's scores grow by with every position of the key."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(first + between, device="cpu")
