"""Graphs, batch invariance and 8-bit floats on the GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift.config import EngineConfig
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.kernels.graphs import memory_taken
from chairlift.runner.gpu import runner as gpu_runner
from chairlift_lab.bench.quality import score
from tests.engine.invariance import check_all_batches, config, prompts
from tests.gpu.greedy import compare_rounded, generate, load_tiny
from tests.models.checkpoints import SIZES, make_reference, save
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.gpu

# Large enough for every kernel to have several tiles and several parts of a sum.
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 3008, "num_hidden_layers": 2, "head_dim": 64}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3Config": {},
    "Qwen3MoeConfig": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "Gemma2Config": {"sliding_window": 48},
}


def wide(folder: Path, shape: str = "Qwen3Config", **options: Any) -> LoadedModel:
    save(make_reference(getattr(transformers, shape)(**(SIZES | WIDE | SHAPES[shape]))), folder)
    return load_tiny(folder, torch.device("cuda"), torch.bfloat16, **options)


def test_memory_of_a_computation_is_measured_and_freed() -> None:
    device = torch.device("cuda")
    held = torch.zeros(1, device=device)
    before = torch.cuda.memory_reserved(device)
    for size in (2**27, 2**30):  # small ones might fit into memory that other tests left cached
        taken = memory_taken(partial(torch.empty, size, dtype=torch.uint8, device=device), device)
        assert size <= taken < 1.5 * size
    assert torch.cuda.memory_reserved(device) <= before
    del held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_invariant_tokens_of_a_tiny_model(tmp_path: Path, dtype: str) -> None:
    """Tokens and logprobs that the host samples: alone, together, in chunks, and after preemptions."""
    tiny = str(write_tiny_checkpoint(tmp_path / "tiny"))
    options = {"device": "cuda", "dtype": dtype}
    loaded = load_model(tiny, config(**options), progress=False)
    check_all_batches(loaded, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rounded", [False, True], ids=["bfloat16", "fp8"])
def test_invariant_tokens_in_every_execution_mode(
    tmp_path: Path, shape: str, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device samples the same tokens with and without graphs, pipelining and other requests."""
    loaded = wide(tmp_path, shape, batch_invariant=True, quantization="fp8" if rounded else "none")
    options: dict[str, Any] = {"batch_invariant": True, "prefix_caching": False}
    options |= {"kv_dtype": "fp8"} if rounded else {}
    prompt_ids = prompts()
    together = generate(loaded, prompt_ids, 40, **options).outputs
    assert len(set(map(tuple, together))) == len(prompt_ids), "the tokens do not depend on the prompt"
    for place in (0, 1, 4):
        assert generate(loaded, [prompt_ids[place]], 40, **options).outputs == [together[place]]
    assert generate(loaded, prompt_ids, 40, cuda_graphs=False, **options).outputs == together
    assert generate(loaded, prompt_ids, 40, max_prefill_tokens=11, **options).outputs == together
    many = generate(loaded, prompt_ids * 20, 40, num_blocks=2000, max_batch_requests=128, **options)
    assert many.outputs == together * 20
    few_blocks = {"num_blocks": 18 if rounded else 36, "block_size": 4}  # 36 blocks; the longest request takes 33
    crowded = generate(loaded, prompt_ids * 3, 40, **few_blocks, **options)
    assert crowded.num_preemptions > 0
    assert crowded.outputs == together * 3
    hits = generate(loaded, prompt_ids * 2, 40, max_batch_requests=2, **options | {"prefix_caching": True})
    assert hits.outputs == together * 2
    monkeypatch.setattr(gpu_runner, "STEPS_AHEAD", 0)
    assert generate(loaded, prompt_ids, 40, **options).outputs == together
    assert generate(loaded, prompt_ids, 40, cuda_graphs=False, **options).outputs == together


# hidden size, intermediate size, heads, 8 key heads of 128 numbers, vocabulary
REAL_SHAPES = {"qwen3-0.6b": (1024, 3072, 16, 151_936), "llama3-8b": (4096, 14_336, 32, 128_256)}


@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_invariant_products_of_real_shapes(shape: str) -> None:
    """Rows and their sums of squares have the same bits in the tile of every number of rows."""
    from chairlift.kernels.triton.products.product import product
    from chairlift.kernels.triton.products.tiling import tiles_agree
    from tests.kernels.test_triton_invariant import summed_in_pairs

    hidden, inner, heads, vocab = REAL_SHAPES[shape]
    device = torch.device("cuda", 0)
    assert tiles_agree(torch.bfloat16, device)
    kinds = [(128 * (heads + 16), hidden, "normed"), (hidden, 128 * heads, "added"), (inner, hidden, "gated")]
    for columns, depth, kind in [*kinds, (hidden, inner, "added"), (vocab, hidden, "plain")]:
        torch.manual_seed(depth)
        most = 300 if columns == vocab else 4200
        x = torch.randn(most, depth, device=device).bfloat16()
        weight = torch.randn(columns * (1 + (kind == "gated")), depth, device=device).bfloat16() / depth**0.5
        total = torch.randn(most, columns, device=device).bfloat16()
        squares = torch.rand(most, 32, device=device) * depth

        def made(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            some = slice(first, first + count)
            found, sums = product(
                x[some].clone(),  # noqa: B023
                weight,  # noqa: B023
                squares=squares[some] if kind in ("normed", "gated") else None,  # noqa: B023
                eps=1e-6,
                gated=kind == "gated",  # noqa: B023
                add_to=total[some].clone() if kind == "added" else None,  # noqa: B023
                invariant=True,
            )
            return found, summed_in_pairs(found[:, :1] if sums is None else sums)

        whole = made(0, most)
        for first, count in ((0, 1), (most - 1, 1), (5, 16), (1, 17), (9, 33), (3, 64), (20, 65), (7, 128), (2, 257)):
            for found, wanted in zip(made(first, count), whole, strict=True):
                assert found.equal(wanted[first : first + count]), (columns, depth, first, count)
        if most > 2000:
            assert all(map(torch.equal, made(0, 700), (each[:700] for each in whole)))


@pytest.mark.parametrize("shape", REAL_SHAPES)
@pytest.mark.parametrize("rows", [1, 9, 32, 128])
def test_invariant_single_tokens_of_real_shapes(shape: str, rows: int) -> None:
    """Single tokens from the projection have the bits of chunks, whatever their number."""
    from chairlift.kernels.triton.decode import Fresh
    from tests.kernels.attention_cases import make_case
    from tests.kernels.test_triton_invariant import check_single_tokens_from_the_projection

    heads, device = REAL_SHAPES[shape][2], torch.device("cuda")
    starts = [(171 * i + 3000) % 4000 for i in range(rows)]
    case = make_case(
        starts, [1] * rows, heads=heads + 16, kv_heads=8, dim=128, dtype=torch.bfloat16, device=device, seed=rows
    )
    angles = torch.randn(rows, 1, 64, device=device)
    norm = torch.rand(128, device=device).bfloat16() + 0.5 if shape == "qwen3-0.6b" else None
    fresh = Fresh(norm, norm, 1e-6, angles.cos().bfloat16(), angles.sin().bfloat16())
    check_single_tokens_from_the_projection(case, fresh, longest=4096)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_long_prompt_alone_with_a_large_vocabulary(tmp_path: Path, graphs: bool) -> None:
    """The first steps sample nothing, and the product of the output head uses tensor descriptors."""
    reference = make_reference(transformers.Qwen3Config(**(SIZES | WIDE | {"vocab_size": 20_000})))
    save(reference, tmp_path)
    loaded = load_tiny(tmp_path, torch.device("cuda"), torch.bfloat16)
    prompt = torch.randint(0, 20_000, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    run = generate(loaded, [prompt], 8, max_prefill_tokens=70, cuda_graphs=graphs)
    hf = reference.to("cuda", torch.bfloat16)
    assert compare_rounded(hf, [prompt], run.outputs).all_near_ties


@pytest.mark.parametrize("which", ["weights", "cache"])
def test_8_bit_floats_stay_close(tmp_path: Path, which: str, record_property: Any) -> None:
    """Random tokens keep about the same probabilities; `chairlift bench quality` measures a real model."""
    tokens = torch.randint(0, 3000, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    found = {}
    for rounded in (False, True):
        loaded = wide(tmp_path, quantization="fp8" if rounded and which == "weights" else "none")
        cache = "fp8" if rounded and which == "cache" else "auto"
        engine_config = EngineConfig(device="cuda", dtype="bfloat16", kv_memory="8MiB", kv_dtype=cache)
        found[rounded] = score(start_engine(loaded, engine_config).runner, tokens, engine_config.block_size)
    change, spread = found[True].losses - found[False].losses, float(found[False].losses.std())
    agreement = float((found[True].likeliest == found[False].likeliest).double().mean())
    record_property(
        "fp8",
        {
            "model": f"qwen3, {which} in fp8",
            "same likeliest token": f"{agreement:.1%}",
            "losses spread by": f"{spread:.3f}",
            "change by": f"{float(change.std()):.4f}",
            "on average": f"{float(change.mean()):+.4f}",
        },
    )
    assert 0 < float(change.std()) < 0.25 * spread
    assert abs(float(change.mean())) < 0.03 * spread
    assert agreement > 0.6
