"""Llama and families close to it."""

from __future__ import annotations

from chairlift.models.families.base import FAMILIES, Family, rotated_by_list
from chairlift.models.fields import Fields


def _layers_without_rope(config: Fields, index: int) -> bool:
    return not rotated_by_list(config, index, "")


FAMILIES |= {
    "llama": Family(title="Llama 2, Llama 3, SmolLM2", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(title="Mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(
        title="Ministral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    ),
    "granite": Family(
        title="Granite 3",
        defaults={"max_position_embeddings": 2048, "attention_multiplier": 1.0},
    ),
    "smollm3": Family(
        title="SmolLM3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        windowed=_layers_without_rope,
        window_switch=True,
    ),
}
