"""GPT-Neo: unscaled scores, and a sliding window in its local layers."""

from __future__ import annotations

from typing import Any

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import InnerAttention


@ADAPTERS.register("gpt_neo")
class GPTNeoAdapter(InnerAttention):
    attention_class = "GPTNeoSelfAttention"

    def scale(self, module: Any) -> float:
        return 1.0

    def window(self, module: Any) -> int | None:
        return int(module.config.window_size) if module.attention_type == "local" else None
