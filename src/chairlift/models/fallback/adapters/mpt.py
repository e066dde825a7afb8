"""MPT: ALiBi with slopes of its own, and projections that may be clipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import AttentionAdapter

STEEPEST = 8  # the exponent of the last slope; transformers builds the bias with it, whatever the config says


@ADAPTERS.register("mpt")
class MptAdapter(AttentionAdapter):
    attention_class = "MptAttention"
    takes_positions = False
    length_fields = ("max_seq_len",)

    def replace(self, module: Any, index: int) -> None:
        slopes = _slopes(module.n_heads)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            _, rows, size = hidden_states.shape
            fused = module.Wqkv(hidden_states)
            if module.clip_qkv:
                fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
            q, k, v = fused.view(1, rows, 3, module.n_heads, module.head_dim).permute(2, 0, 3, 1, 4)
            bias = self.positions[:, None] * slopes.to(self.positions.device)
            output = self.attend(index, q, k, v, scale=module.softmax_scale, bias=bias)
            return module.out_proj(output.reshape(1, rows, size)), None

        module.forward = forward


def _slopes(num_heads: int) -> Tensor:
    """[heads] float32: those of the next power of two, every second one first if there are fewer heads."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-STEEPEST * (head + 1) / power) for head in range(power)]
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return torch.tensor(slopes, device="cpu")
