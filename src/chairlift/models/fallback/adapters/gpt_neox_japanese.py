"""GPT-NeoX Japanese."""

from __future__ import annotations

from typing import Any

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.base import InnerAttention


@ADAPTERS.register("gpt_neox_japanese")
class GPTNeoXJapaneseAdapter(InnerAttention):
    attention_class = "GPTNeoXJapaneseAttention"

    def scale(self, module: Any) -> float:
        return float(1 / module.norm_factor)
