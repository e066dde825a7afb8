"""Latent attention on a GPU: the kernels in the shapes of DeepSeek V2-Lite and V3, and a model against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.gpu.greedy import compare_rounded, generate, load_tiny
from tests.gpu.test_modes import WIDE
from tests.kernels.attention_cases import TOLERANCE
from tests.kernels.test_triton_latent import error, make_case, reference, run
from tests.models.checkpoints import SIZES, make_reference, save

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DEEPSEEK: dict[str, Any] = {"rank": 512, "nope": 128, "rope": 64, "value": 128, "block_size": 16, "device": DEVICE}


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=["bfloat16", "fp8"])
def test_kernels(heads: int, cache: torch.dtype) -> None:
    for starts, counts in (
        ([0, 700, 9000], [1, 1, 1]),
        ([64, 8191, 30000], [1, 1, 1]),
        ([5, 300, 0, 1000], [1, 1, 130, 200]),
    ):
        case = make_case(starts, counts, heads=heads, dtype=torch.bfloat16, cache_dtype=cache, **DEEPSEEK)
        allowed = 2 * TOLERANCE[torch.bfloat16] if cache is torch.bfloat16 else 0.05
        assert error(run(case, tile_queries=64, padding=3), reference(case)) < allowed


@pytest.mark.parametrize("graphs", [True, False])
def test_a_model(tmp_path: Path, graphs: bool) -> None:
    latent = {"num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    latent |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 8}
    latent |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    reference_model = make_reference(transformers.DeepseekV3Config(**(SIZES | WIDE | latent)))
    save(reference_model, tmp_path)
    loaded = load_tiny(tmp_path, DEVICE, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 3000, (length,), generator=generator).tolist() for length in (5, 300, 41)]
    found = generate(loaded, texts, 8, max_prefill_tokens=70, cuda_graphs=graphs)
    hf = reference_model.to("cuda", torch.bfloat16)
    assert compare_rounded(hf, texts, found.outputs).all_near_ties
