"""The dense GLM-4 models, and Phi-3, whose checkpoints also hold gate and up as one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chairlift.models.config import NormNames, PartNames
from chairlift.models.families.base import FAMILIES, TEXT_PARTS, Family

_GATE_UP = ("gate_up_proj",)
_GLM: dict[str, Any] = {
    "defaults": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "names": PartNames(inner=_GATE_UP),
    "output_bias": False,
    "interleaved_rope": True,
}

FAMILIES |= {
    "phi3": Family(
        title="Phi-3",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        names=PartNames(qkv=("qkv_proj",), inner=_GATE_UP),
    ),
    "glm": Family(title="GLM-4", **_GLM),
    "glm4": Family(
        title="GLM-4-0414",
        norms=NormNames(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        **_GLM,
    ),
}
TEXT_PARTS["glm4v_text"] = replace(
    FAMILIES["glm4"],
    title="GLM-4.1V",
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    },
)
TEXT_PARTS["glm_ocr_text"] = replace(
    TEXT_PARTS["glm4v_text"],
    title="GLM-OCR",
    defaults={"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    qkv_bias=False,
)
