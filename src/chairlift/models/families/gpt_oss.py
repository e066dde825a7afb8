"""gpt-oss: attention with sinks, experts with biases and a clamped gate."""

from __future__ import annotations

from chairlift.models.experts import ExpertNames, ExpertsFamily
from chairlift.models.families.base import FAMILIES, Family
from chairlift.models.fields import Fields

_EXPERTS = ExpertNames(router="router", transposed=True, interleaved=True)


def _every_second_layer(config: Fields, index: int) -> bool:
    return index % 2 == 0


FAMILIES |= {
    "gpt_oss": Family(
        title="gpt-oss",
        defaults={
            "vocab_size": 201_088,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        windowed=_every_second_layer,
        sinks=True,
        experts=ExpertsFamily(names=_EXPERTS, router_bias=True, bias=True, clamped_gate=True),
    ),
}
