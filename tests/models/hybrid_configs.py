"""Tiny configs of the families with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.models.checkpoints import SIZES

transformers = pytest.importorskip("transformers")


def _config(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**(SIZES | changes))


RECURRENT, FULL = "linear_attention", "full_attention"
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "layer_types": [RECURRENT, FULL, RECURRENT],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 18,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 20,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 14,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "time_step_min": 1e-6,  # by which transformers limits time steps
    "n_routed_experts": 6,
    "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 18,
}
HYBRID_CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba 2": _config("Mamba2Config", num_heads=6, head_dim=20, n_groups=2, state_size=12, chunk_size=8),
    "mamba 2, biases, limited steps": _config(
        "Mamba2Config",
        num_heads=12,
        head_dim=10,
        n_groups=1,
        state_size=5,
        chunk_size=8,
        conv_kernel=3,
        use_bias=True,
        use_conv_bias=False,
        time_step_limit=(0.02, 0.3),
        tie_word_embeddings=True,
    ),
    "bamba": _config("BambaConfig", **_MAMBA, attn_layer_indices=[1], num_attention_heads=5, num_key_value_heads=1),
    "falcon h1": _config(
        "FalconH1Config",
        **_MAMBA | {"mamba_d_head": 15},
        mamba_d_ssm=90,
        embedding_multiplier=3.0,
        lm_head_multiplier=0.6,
        key_multiplier=0.7,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.9,
        ssm_multipliers=[0.5, 0.8, 1.2, 1.5, 0.7],
        mlp_multipliers=[0.9, 0.6],
    ),
    "falcon h1, norm after the gate": _config(
        "FalconH1Config", **_MAMBA, mamba_d_ssm=None, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "falcon h1, norm before the gate": _config(
        "FalconH1Config", **_MAMBA, mamba_d_ssm=None, mamba_rms_norm=True, ssm_out_multiplier=0.5
    ),
    "nemotron h": _config(
        "NemotronHConfig",
        **_NEMOTRON,
        layers_block_type=[RECURRENT, "mlp", FULL, RECURRENT, "mlp"],
        sliding_window=3,  # transformers ignores it
    ),
    "nemotron h, experts": _config(
        "NemotronHConfig",
        **_NEMOTRON,
        layers_block_type=[RECURRENT, "moe", FULL, "moe"],
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.7,
    ),
    "nemotron h, experts of a projection": _config(
        "NemotronHConfig", **_NEMOTRON, layers_block_type=[RECURRENT, "moe", FULL], moe_latent_size=26
    ),
    "granite 4": _config(
        "GraniteMoeHybridConfig",
        **_MAMBA,
        layer_types=[RECURRENT, FULL, RECURRENT],
        num_local_experts=5,
        shared_intermediate_size=22,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.3,
        logits_scaling=0.5,
    ),
    "granite 4 dense, rope": _config(
        "GraniteMoeHybridConfig",
        **_MAMBA,
        layer_types=[RECURRENT, FULL, RECURRENT],
        num_local_experts=0,
        shared_intermediate_size=22,
        position_embedding_type="rope",
    ),
    "lfm2 moe": _config(
        "Lfm2MoeConfig",
        layer_types=["conv", FULL, "conv"],
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=22,
    ),
    "kimi linear": _config(
        "KimiLinearConfig",
        num_key_value_heads=6,
        layer_types=[RECURRENT, FULL, RECURRENT],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_num_heads=5,
        linear_head_dim=14,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        num_local_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=22,
    ),
    "lfm2": _config("Lfm2Config", layer_types=["conv", FULL, "conv"], block_multiple_of=8),
    "lfm2, biases": _config(
        "Lfm2Config", full_attn_idxs=[0], conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False
    ),
    "qwen3 next": _config("Qwen3NextConfig", **_DELTA, **_EXPERTS),
    "qwen3 next, some layers dense": _config(
        "Qwen3NextConfig",
        **_DELTA | {"layer_types": None, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
        **_EXPERTS,
        num_hidden_layers=4,
        mlp_only_layers=[1],
    ),
    "qwen3.5": _config("Qwen3_5TextConfig", **_DELTA, tie_word_embeddings=True),
    "qwen3.5 moe": _config("Qwen3_5MoeTextConfig", **_DELTA, **_EXPERTS),
}
