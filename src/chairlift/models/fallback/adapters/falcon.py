"""Falcon: rotary positions, or ALiBi in its oldest models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import AttentionAdapter
from chairlift.models.fallback.adapters.bloom import alibi_slopes


@ADAPTERS.register("falcon")
class FalconAdapter(AttentionAdapter):
    attention_class = "FalconAttention"

    def replace(self, module: Any, index: int) -> None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        # transformers computes the bias in 16 bits, and the models were trained with it
        slopes = alibi_slopes(module.num_heads).bfloat16()

        def forward(
            hidden_states: Tensor, alibi: Tensor | None, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            q, k, v = _split(module, module.query_key_value(hidden_states))
            bias = None
            if alibi is None:
                q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            else:
                bias = (self.positions[:, None] * slopes.to(self.positions.device)).float() * module.inv_norm_factor
            output = self.attend(index, q, k, v, scale=module.inv_norm_factor, bias=bias)
            return module.dense(output.flatten(2)), None

        module.forward = forward


def _split(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fused projection [1, T, size] -> q, k, v [1, heads or kv_heads, T, head_dim]."""
    if module.new_decoder_architecture or not module.multi_query:  # a group of queries, its key, its value; and so on
        groups = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
        q, k, v = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
    else:  # all queries, one key, one value
        q, k, v = torch.split(fused.unflatten(-1, (-1, module.head_dim)), [module.num_heads, 1, 1], dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
