"""GPT, the first one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import AttentionAdapter


@ADAPTERS.register("openai_gpt")
class GPTAdapter(AttentionAdapter):
    attention_class = "Attention"

    def replace(self, module: Any, index: int) -> None:
        def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
            scale = v.shape[-1] ** -0.5 if module.scale else 1.0
            return [self.attend(index, q, k.transpose(2, 3), v, scale=scale).transpose(1, 2)]

        module._attn = attention
