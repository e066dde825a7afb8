"""The dense Qwen models."""

from __future__ import annotations

from chairlift.models.families.base import FAMILIES, SAME_AS, Family, upper_layers

# The text parts of models that also read images and sound; MiMo adds layers that predict further tokens.
SAME_AS |= {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "mimo": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_omni_moe_text": "qwen3_moe",
}
FAMILIES |= {
    "qwen2": Family(
        title="Qwen2, Qwen2.5",
        defaults={"max_window_layers": 28, "sliding_window": 4096, "qkv_bias": True},
        qkv_bias="qkv_bias",
        output_bias=False,
        windowed=upper_layers,
        window_switch=True,
    ),
    "qwen3": Family(
        title="Qwen3",
        defaults={"head_dim": 128, "max_window_layers": 28, "sliding_window": 4096},
        qk_norm="head",
        windowed=upper_layers,
        window_switch=True,
    ),
}
