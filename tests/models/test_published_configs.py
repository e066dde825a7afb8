"""Published config files, with old names and missing fields.

The config that transformers makes of them, with all its defaults, must describe the same decoder.
"""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.models import describe
from chairlift.models.config import DecoderConfig

transformers = pytest.importorskip("transformers")

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 2": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
    },
    "llama 3.1": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "vocab_size": 128256,
    },
    "mistral v0.1": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "mistral nemo": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "qwen2.5": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
    },
    "smollm3": {
        "model_type": "smollm3",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rope_theta": 5000000.0,
        "vocab_size": 128256,
    },
    "phi 3 mini 128k": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rope_scaling": {
            "long_factor": [1.0 + i / 7 for i in range(48)],
            "short_factor": [1.0 + i / 90 for i in range(48)],
            "original_max_position_embeddings": 4096,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "vocab_size": 32064,
    },
    "phi 4 mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "long_factor": [1.0 + i / 7 for i in range(48)],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "gemma 2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma 3 1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma 3 4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "olmo 2": {
        "model_type": "olmo2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "vocab_size": 100352,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_those_of_transformers(name: str) -> None:
    published = PUBLISHED[name]
    filled_in = transformers.CONFIG_MAPPING[published["model_type"]].from_dict(published).to_dict()
    assert describe(published) == describe(filled_in)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama 2", 6.74),
        ("llama 3.1", 8.03),
        ("mistral nemo", 12.2),
        ("qwen2.5", 0.494),
        ("qwen3 moe", 30.5),
        ("phi 4 mini", 3.84),
        ("gemma 2", 2.61),
        ("olmo 2", 1.48),
    ],
)
def test_sizes_are_the_advertised_ones(name: str, billions: float) -> None:
    assert describe(PUBLISHED[name]).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_text_part_beside_an_image_part() -> None:
    inner = PUBLISHED["gemma 3 4b"]
    whole = describe({"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152}})
    alone = describe(inner)
    assert isinstance(whole, DecoderConfig)
    assert whole.text_part_only
    assert whole.layers == alone.layers  # type: ignore[attr-defined]
    windows = [layer.window for layer in whole.attention_layers]
    assert windows[:7] == [1024, 1024, 1024, 1024, 1024, None, 1024]


def test_query_bias_in_a_config_made_from_gguf() -> None:
    """Such a config has attention_bias for Qwen2, which has none on its output projection."""
    config = PUBLISHED["qwen2.5"] | {"attention_bias": True}
    assert describe(config) == describe(PUBLISHED["qwen2.5"])
