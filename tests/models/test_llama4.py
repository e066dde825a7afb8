"""Llama 4: greedy tokens as transformers in every way, and the text part of multimodal checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chairlift.models import describe
from tests.models.checkpoints import assert_matches, load, make_reference, save, stream
from tests.models.greedy_everywhere import assert_greedy_everywhere
from tests.tiny import byte_level_tokenizer

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 32,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "max_position_embeddings": 256,
}
PROMPTS = [[5, 17, 40, 211, 90], [3 + 7 * i % 290 for i in range(43)], [3 + 7 * i % 290 for i in range(30)]]


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    reference = make_reference(transformers.Llama4TextConfig(**SIZES))
    save(reference, tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert_greedy_everywhere(tmp_path, reference, PROMPTS)


def test_text_part_of_multimodal_checkpoints(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = transformers.Llama4Config(text_config=dict(SIZES), vision_config=vision)
    torch.manual_seed(0)
    whole = transformers.Llama4ForConditionalGeneration(config).eval()
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    assert save(whole, tmp_path)["model_type"] == "llama4"
    assert any("vision_model" in name for name, _ in stream(tmp_path))
    assert_matches(load(tmp_path), whole, 23, 3)


def test_the_published_configs() -> None:
    """Scout and Maverick have an empty list of layers without rotation, and a number for the temperature."""
    scout = {"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "no_rope_layers": []}
    layers = describe(scout | {"attn_temperature_tuning": 4}).attention_layers
    assert [layer.chunk for layer in layers[:5]] == [8192, 8192, 8192, None, 8192]
    maverick = scout | {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False}
    assert 390e9 < describe(maverick).num_parameters < 410e9
    assert 105e9 < describe(scout).num_parameters < 112e9
