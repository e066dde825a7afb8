"""Published config files of families with recurrent layers, with old names and missing fields.

The config that transformers makes of them, with all its defaults, must describe the same decoder.
"""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.errors import CorruptCheckpoint
from chairlift.models import describe

transformers = pytest.importorskip("transformers")

_LIMITS = [0.0, float("inf")]
_KIMI_ATTENTION = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3 next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    "granite 4 tiny": {
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "bamba": {
        "model_type": "bamba",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "max_position_embeddings": 4096,
        "time_step_limit": _LIMITS,
        "vocab_size": 128256,
    },
    "nemotron h": {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "time_step_limit": _LIMITS,
        "vocab_size": 131072,
    },
    "falcon h1": {
        "model_type": "falcon_h1",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "max_position_embeddings": 16384,
        "vocab_size": 32784,
    },
    "lfm2": {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "tie_embedding": True,
        "vocab_size": 65536,
    },
    "kimi linear": {
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "linear_attn_config": {
            "full_attn_layers": _KIMI_ATTENTION,
            "kda_layers": [layer for layer in range(1, 28) if layer not in _KIMI_ATTENTION],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "model_max_length": 1048576,
        "vocab_size": 163840,
    },
    "mamba 2": {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "n_groups": 1,
        "num_heads": 80,
        "tie_word_embeddings": True,
        "time_step_limit": _LIMITS,
        "vocab_size": 50288,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_those_of_transformers(name: str) -> None:
    published = PUBLISHED[name]
    filled_in = transformers.CONFIG_MAPPING[published["model_type"]].from_dict(published).to_dict()
    filled_in.pop("linear_attn_config", None)  # then the fields that transformers made of it count
    assert describe(published) == describe(filled_in)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3 next", 79.7),
        ("granite 4 tiny", 6.94),
        ("bamba", 9.78),
        ("nemotron h", 8.1),
        ("falcon h1", 0.521),
        ("lfm2", 1.17),
        ("kimi linear", 49.1),
        ("mamba 2", 2.7),
    ],
)
def test_sizes_are_the_advertised_ones(name: str, billions: float) -> None:
    assert describe(PUBLISHED[name]).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_states_of_a_sequence() -> None:
    """Qwen3-Next: 36 layers of 32 matrices of 128 x 128 and 3 inputs of 8192 channels, in float32."""
    layers = describe(PUBLISHED["qwen3 next"]).recurrent_layers
    assert len(layers) == 36
    assert sum(layer.num_bytes for layer in layers) == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert len(describe(PUBLISHED["qwen3 next"]).attention_layers) == 12


@pytest.mark.parametrize("name", PUBLISHED)
def test_too_many_layers_are_refused_before_anything_is_made_for_each(name: str) -> None:
    config = {key: value for key, value in PUBLISHED[name].items() if key != "layer_types"}
    if "hybrid_override_pattern" in config or "layers_block_type" in config:
        pytest.skip("the list in the file has the number of layers")
    with pytest.raises(CorruptCheckpoint, match="num_hidden_layers must be an integer between 1 and 4096"):
        describe(config | {"num_hidden_layers": 2**30})
