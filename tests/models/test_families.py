"""Every family against transformers, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.mlp import GatedMLP
from chairlift.models import build_model, describe, supported_families
from chairlift.models.decoder import Decoder
from chairlift.models.families import FAMILIES
from tests.models.checkpoints import (
    CPU,
    SIZES,
    VOCAB,
    assert_matches,
    load,
    make_reference,
    prompts,
    reference_logits,
    run_alone,
    save,
    stream,
)
from tests.models.hybrid_configs import HYBRID_CONFIGS

transformers = pytest.importorskip("transformers")


LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 22,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}


def _config(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**(SIZES | changes))


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama gqa": _config("LlamaConfig"),
    "llama mha": _config("LlamaConfig", num_key_value_heads=6),
    "llama mqa, tied, biases": _config(
        "LlamaConfig",
        num_attention_heads=5,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama wide heads, gelu": _config("LlamaConfig", head_dim=16, hidden_act="gelu"),
    "mistral": _config("MistralConfig", sliding_window=7),
    "mistral without window": _config("MistralConfig", sliding_window=None),
    "mixtral": _config("MixtralConfig", num_local_experts=5, num_experts_per_tok=2),
    "mixtral window": _config("MixtralConfig", num_local_experts=3, num_experts_per_tok=1, sliding_window=6),
    "gpt oss": _config(
        "GptOssConfig",
        head_dim=10,
        sliding_window=5,
        num_local_experts=6,
        num_experts_per_tok=3,
        swiglu_limit=0.8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    "gpt oss without biases, default rope": _config(
        "GptOssConfig",
        num_local_experts=3,
        num_experts_per_tok=1,
        attention_bias=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "llama4": _config(
        "Llama4TextConfig",
        head_dim=10,
        num_hidden_layers=4,
        intermediate_size_mlp=44,
        num_local_experts=5,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        attention_chunk_size=9,
        floor_scale=4,
        attn_scale=0.3,
    ),
    "llama4 without norms, temperature and dense layers": _config(
        "Llama4TextConfig",
        head_dim=10,
        no_rope_layers=[0, 1, 1],
        num_local_experts=3,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_chunk_size=16,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": _config("Qwen2Config"),
    "qwen2 window": _config(
        "Qwen2Config", use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen2 moe": _config(
        "Qwen2MoeConfig",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "qwen2 moe without biases": _config(
        "Qwen2MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        qkv_bias=False,
        norm_topk_prob=True,
    ),
    "deepseek v2": _config(
        "DeepseekV2Config",
        **LATENT,
        n_routed_experts=8,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
    ),
    "deepseek v2 lite": _config(
        "DeepseekV2Config",
        **LATENT | {"q_lora_rank": None},
        n_routed_experts=6,
        topk_method="greedy",
        n_group=3,
        topk_group=1,
        first_k_dense_replace=0,
        attention_bias=True,
    ),
    "deepseek v3, yarn": _config(
        "DeepseekV3Config",
        **LATENT,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "rope_theta": 1e4,
        },
    ),
    "deepseek v3, rotated halves": _config(
        "DeepseekV3Config", **LATENT, n_routed_experts=4, n_group=1, topk_group=1, rope_interleave=False
    ),
    "youtu": _config("YoutuConfig", **LATENT),
    "glm4 moe lite": _config(
        "Glm4MoeLiteConfig", **LATENT, n_routed_experts=5, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "qwen3": _config("Qwen3Config", head_dim=14),
    "qwen3 window": _config("Qwen3Config", head_dim=14, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3 moe": _config(
        "Qwen3MoeConfig",
        head_dim=14,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        norm_topk_prob=True,
    ),
    "qwen3 moe, some layers dense": _config(
        "Qwen3MoeConfig",
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=22,
        norm_topk_prob=False,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=9,
    ),
    "smollm3": _config("SmolLM3Config", num_hidden_layers=4, no_rope_layer_interval=2),
    "smollm3 window": _config("SmolLM3Config", no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=6),
    "phi3": _config("Phi3Config", sliding_window=8),
    "phi3 partial rotary": _config("Phi3Config", partial_rotary_factor=0.6, num_attention_heads=3),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=6,
        sliding_window_pattern=3,
        query_pre_attn_scalar=20,
        rope_theta=500_000.0,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "granite": _config(
        "GraniteConfig",
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,  # large: a stream of another size must be normalised with another eps
    ),
    "glm": _config("GlmConfig", head_dim=12),
    "glm4": _config("Glm4Config", head_dim=16, partial_rotary_factor=0.25, attention_bias=False),
    "ministral": _config(
        "MinistralConfig",
        head_dim=12,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo3": _config(
        "Olmo3Config",
        num_hidden_layers=4,
        sliding_window=6,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "cohere": _config("CohereConfig", logit_scale=0.8),
    "cohere qk norm": _config("CohereConfig", logit_scale=0.5, use_qk_norm=True, attention_bias=True),
    "cohere2": _config("Cohere2Config", num_hidden_layers=4, logit_scale=0.8, sliding_window=6),
    "ernie4_5": _config("Ernie4_5Config", head_dim=12, use_bias=True),
    "exaone4": _config("Exaone4Config", num_hidden_layers=4, sliding_window=6),
    "exaone4 without window": _config(
        "Exaone4Config", sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 3
    ),
    "seed_oss": _config("SeedOssConfig", head_dim=12),
    "helium": _config("HeliumConfig", head_dim=10),
    "hunyuan": _config("HunYuanDenseV1Config", head_dim=12),
    "hunyuan alpha": _config(
        "HunYuanDenseV1Config", head_dim=12, rope_scaling={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    ),
    "nemotron": _config("NemotronConfig", head_dim=12),
    "apertus": _config("ApertusConfig"),
    "arcee": _config("ArceeConfig"),
    "starcoder2": _config("Starcoder2Config", sliding_window=7),
    "phi": _config("PhiConfig", partial_rotary_factor=0.4),
    "phi qk norm": _config("PhiConfig", partial_rotary_factor=0.4, qk_layernorm=True),
    "stablelm": _config("StableLmConfig", partial_rotary_factor=0.4),
    "stablelm parallel, qk norm": _config(
        "StableLmConfig",
        partial_rotary_factor=0.4,
        qk_layernorm=True,
        use_parallel_residual=True,
        use_qkv_bias=True,
    ),
    "ministral3": _config(
        "Ministral3Config",
        head_dim=12,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.9,
        },
    ),
    "dots1": _config(
        "Dots1Config",
        head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=22,
        first_k_dense_replace=1,
        routed_scaling_factor=1.6,
        norm_topk_prob=True,
    ),
    "ernie4_5_moe": _config(
        "Ernie4_5_MoeConfig",
        num_hidden_layers=4,
        moe_num_experts=5,
        moe_k=2,
        moe_intermediate_size=22,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
    ),
    "glm4_moe": _config(
        "Glm4MoeConfig",
        head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=22,
        use_qk_norm=True,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.6,
    ),
    "granitemoe": _config(
        "GraniteMoeConfig",
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=0.7,
        attention_multiplier=0.4,
    ),
    "minimax_m2": _config("MiniMaxM2Config", head_dim=12, rotary_dim=6, num_local_experts=5, num_experts_per_tok=2),
    "olmoe": _config("OlmoeConfig", num_experts=5, num_experts_per_tok=2),
    "olmoe clipped": _config("OlmoeConfig", num_experts=5, num_experts_per_tok=2, clip_qkv=0.7, norm_topk_prob=True),
    "gemma4": _config(
        "Gemma4TextConfig",
        head_dim=16,
        global_head_dim=24,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=6,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    "gemma4 keys as values": _config(
        "Gemma4TextConfig",
        head_dim=16,
        global_head_dim=24,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=6,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "gemma4, one head size": _config(
        "Gemma4TextConfig",
        head_dim=16,
        global_head_dim=16,  # then the saved config has an empty per_layer_config
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=6,
        hidden_size_per_layer_input=0,
    ),
    "olmo2": _config("Olmo2Config"),
    "olmo2 mqa, biases": _config("Olmo2Config", num_attention_heads=5, num_key_value_heads=1, attention_bias=True),
}

CONFIGS |= HYBRID_CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = make_reference(CONFIGS[name]())
    config = save(reference, tmp_path)
    model = load(tmp_path)
    assert_matches(model, reference, 23, 1, 12)
    assert model.vocab_size == VOCAB
    assert model.max_len == 128
    assert model.attention_layers == describe(config).attention_layers
    assert describe(config).num_parameters == sum(tensor.numel() for _, tensor in stream(tmp_path))


def test_every_family_is_tested() -> None:
    tested = {make().model_type for make in CONFIGS.values()} | {"deepseek_v32", "glm_moe_dsa"}  # in test_sparse.py
    assert tested == FAMILIES.keys()
    assert len(supported_families()) == len(FAMILIES)


def test_text_part_of_multimodal_gemma3(tmp_path: Path) -> None:
    text = CONFIGS["gemma3"]()
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.set_attn_implementation("eager")
    assert save(whole, tmp_path)["model_type"] == "gemma3"
    assert any("vision_tower" in name for name, _ in stream(tmp_path))
    assert_matches(load(tmp_path), whole, 23, 3)


def test_sparse_attention_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["deepseek v3, rotated halves"]().to_dict() | {"index_topk": 64}
    with pytest.raises(UnsupportedModel, match="sparse attention, which this family does not have"):
        describe(config)


def test_experts_stacked_in_the_checkpoint(tmp_path: Path) -> None:
    """Newer checkpoints hold a layer's experts as two tensors of three dimensions."""
    reference = make_reference(CONFIGS["qwen2 moe"]())
    config = save(reference, tmp_path)
    stacked = {name: tensor for name, tensor in reference.state_dict().items() if not name.endswith("inv_freq")}
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in dict(stream(tmp_path))
    assert_matches(build_model(config, stacked.items(), dtype=torch.float32, device=CPU), reference, 9)
    stacked["model.layers.0.mlp.experts.down_proj"] = stacked["model.layers.0.mlp.experts.down_proj"][:-1]
    with pytest.raises(CorruptCheckpoint, match=r"lacks layers.0.mlp.experts.4.down_proj.weight"):
        build_model(config, stacked.items(), dtype=torch.float32, device=CPU)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = make_reference(CONFIGS["glm4_moe"]())
    config = save(reference, tmp_path) | {"num_nextn_predict_layers": 1}
    behind = [("model.layers.3.eh_proj.weight", torch.zeros(60, 120)), ("mtp.fc.weight", torch.zeros(60, 60))]
    tensors = [*stream(tmp_path), *behind]
    with caplog.at_level("INFO", logger="chairlift"):
        model = build_model(config, tensors, dtype=torch.float32, device=torch.device("cpu"))
    assert "layers for multi-token prediction are not loaded: 1" in caplog.text
    assert_matches(model, reference, 9)
    with pytest.raises(CorruptCheckpoint, match=r"unexpected tensor model\.layers\.3"):
        build_model(config | {"num_nextn_predict_layers": 0}, tensors, dtype=torch.float32, device=torch.device("cpu"))


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    reference = make_reference(CONFIGS["llama gqa"]())
    config = save(reference, tmp_path)
    bare = ((name.removeprefix("model."), tensor) for name, tensor in stream(tmp_path))
    model = build_model(config, bare, dtype=torch.float32, device=torch.device("cpu"))
    assert_matches(model, reference, 9)


@pytest.mark.parametrize("name", ["llama gqa", "gemma3", "mixtral", "olmo2"])
def test_bfloat16_stays_close(name: str, tmp_path: Path) -> None:
    """Rounding differs from transformers, but the distributions stay close."""
    reference = make_reference(CONFIGS[name]())
    save(reference, tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    tokens = prompts(20)[0]
    exact = reference_logits(reference, tokens).log_softmax(-1)
    theirs = reference_logits(reference.to(torch.bfloat16), tokens).log_softmax(-1)
    ours = run_alone(model, tokens).float()
    errors, their_errors = ((found - exact).abs().mean(-1) for found in (ours.log_softmax(-1), theirs))
    # Per row: a mean over all rows would hide one that is wrong.
    assert (errors < 2 * their_errors.clamp(min=float(their_errors.median()))).all()


@torch.inference_mode()
def test_the_last_layer_computes_only_the_requested_rows(tmp_path: Path) -> None:
    model = load(tmp_path, save(make_reference(CONFIGS["llama gqa"]()), tmp_path))
    assert isinstance(model, Decoder)
    seen: list[int] = []
    for layer in model.layers:
        assert isinstance(layer.mlp, GatedMLP)
        inner = layer.mlp.inner
        layer.mlp.inner = lambda x, inner=inner: (seen.append(len(x)), inner(x))[1]  # type: ignore[method-assign]
    run_alone(model, torch.arange(7), torch.tensor([6, 2]))
    assert seen == [7] * (len(model.layers) - 1) + [2]
