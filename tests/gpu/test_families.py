"""Tiny models of every family on the GPU, against transformers there, or against our CPU where that is too old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift.runner.gpu import runner as gpu_runner
from tests.comparison import reference_tokens
from tests.gpu.greedy import compare_rounded, count_ties, generate, load_tiny, rounding_row
from tests.gpu.references import NAMES, difference_of, saved_reference
from tests.models.checkpoints import SIZES, make_reference, prompts, save
from tests.models.test_families import CONFIGS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NEW_TOKENS = 24
SMALL_POOL = {"num_blocks": 13, "block_size": 4, "max_batch_tokens": 16, "max_batch_requests": 6}
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "without graphs": {"cuda_graphs": False},
    "chunks of 7": {"max_prefill_tokens": 7, "block_size": 4},
    "preempted": SMALL_POOL | {"prefix_caching": False},
    "swapped": SMALL_POOL | {"preemption": "swap", "swap_memory": "1MiB"},
}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(
    name: str, tmp_path: Path, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = saved_reference(name, tmp_path, DEVICE)
    loaded = load_tiny(tmp_path, DEVICE, torch.float32)
    prompt_ids = [tokens.tolist() for tokens in prompts(1, 3, 9, 17, 26, 40)]
    expected = [reference_tokens(hf, prompt, NEW_TOKENS) for prompt in prompt_ids]
    runs = {}
    for waits in (False, True):  # whether a step is read before the next one is queued
        if waits:
            monkeypatch.setattr(gpu_runner, "STEPS_AHEAD", 0)
        for setting, options in SETTINGS.items():
            if setting == "swapped" and loaded.model.recurrent_layers:
                continue  # states are not swapped
            runs[setting, waits] = generate(
                loaded, prompt_ids, NEW_TOKENS if "num_blocks" not in options else 10, **options
            )
    ties = 0
    for (setting, _), run in runs.items():
        ties += count_ties(hf, prompt_ids, expected, run.outputs)
        # With windows, the small pool may be enough.
        all_full = all(layer.window is None and layer.chunk is None for layer in loaded.model.attention_layers)
        small = setting in ("preempted", "swapped") and loaded.model.attention_layers and all_full
        assert not small or run.num_preemptions > 0
    together = runs["together", False].outputs
    assert all(
        runs[setting, waits].outputs == together
        for setting in ("together", "without graphs")
        for waits in (False, True)
    )
    row = {"model": name, "settings": len(runs), "tokens": sum(map(len, together)), "ties within 1e-4": ties}
    row["reference"] = "ours on a CPU" if difference_of(name) else "transformers"
    record_property("greedy", row)


@pytest.mark.parametrize("name", NAMES)
def test_rounded_tokens_differ_at_near_ties_only(name: str, tmp_path: Path, record_property: Any) -> None:
    if (difference := difference_of(name)) is not None:
        pytest.skip(difference)
    hf = make_reference(CONFIGS[name]()).to(DEVICE).bfloat16()
    save(hf, tmp_path)
    loaded = load_tiny(tmp_path, DEVICE, torch.bfloat16)
    prompt_ids = [tokens.tolist() for tokens in prompts(1, 3, 9, 17, 26, 40, 60)]
    outputs = generate(loaded, prompt_ids, 60).outputs
    found = compare_rounded(hf, prompt_ids, outputs)
    record_property("rounding", rounding_row(name, found))
    assert found.all_near_ties, found


# Sizes supported by the products for steps with few rows; the models above use the other kernels.
EVEN = SIZES | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
FUSED: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 20},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 32},
    "SmolLM3Config": {"no_rope_layer_interval": 2},
    "Phi3Config": {"partial_rotary_factor": 0.5},
    # Layer by layer: norms behind the blocks.
    "Gemma2Config": {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 20},
    "Gemma3TextConfig": {"head_dim": 32, "sliding_window": 20, "sliding_window_pattern": 2},
    "Gemma4TextConfig": {
        "head_dim": 32,
        "global_head_dim": 64,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 20,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "use_double_wide_mlp": True,
    },
    "Glm4Config": {"head_dim": 32, "attention_bias": True},
    "Olmo2Config": {},
    "Olmo3Config": {"sliding_window": 20, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("config", FUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_fused_layers_differ_at_near_ties_only(
    config: str, dtype: torch.dtype, tmp_path: Path, record_property: Any
) -> None:
    hf = make_reference(getattr(transformers, config)(**(EVEN | FUSED[config]))).to(DEVICE, dtype)
    save(hf, tmp_path)
    loaded = load_tiny(tmp_path, DEVICE, dtype)
    prompt_ids = [tokens.tolist() for tokens in prompts(1, 3, 9, 17, 26, 40, 60)]
    outputs = generate(loaded, prompt_ids, 60).outputs
    found = compare_rounded(hf, prompt_ids, outputs)
    record_property("rounding", rounding_row(f"{config}, fused, {str(dtype).removeprefix('torch.')}", found))
    assert found.all_near_ties, found
