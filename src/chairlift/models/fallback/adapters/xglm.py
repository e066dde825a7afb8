"""XGLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import AttentionAdapter


@ADAPTERS.register("xglm")
class XGLMAdapter(AttentionAdapter):
    attention_class = "XGLMAttention"

    def replace(self, module: Any, index: int) -> None:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            q, k, v = (
                project(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
                for project in (module.q_proj, module.k_proj, module.v_proj)
            )
            return module.out_proj(self.attend(index, q, k, v, scale=module.scaling).flatten(2)), None

        module.forward = forward
