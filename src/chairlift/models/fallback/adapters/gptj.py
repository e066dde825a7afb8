"""GPT-J."""

from __future__ import annotations

from typing import Any

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import InnerAttention


@ADAPTERS.register("gptj")
class GPTJAdapter(InnerAttention):
    attention_class = "GPTJAttention"

    def scale(self, module: Any) -> float:
        return float(1 / module.scale_attn)
