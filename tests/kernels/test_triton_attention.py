"""Paged attention kernels against float64, on random ragged mixes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton

from chairlift.attention.backends.bursted import BurstedAttention
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.attention.storage import KVStorage
from chairlift.kernels.gpu import META, described_gpu, known_gpu
from chairlift.kernels.triton.attention import DEEP_TILE, Scoring, _key_tile
from chairlift.kernels.triton.decode import DecodeTiling, Scratch, decode_splits
from chairlift.kernels.triton.hopper_prefill import obstacles
from chairlift.kernels.triton.launch import hopper_obstacle
from tests.kernels.attention_cases import (
    TOLERANCE,
    check_fused_decode,
    error,
    make_case,
    reference,
    run_decode,
    run_prefill,
)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (4, 2, 32), (6, 2, 24), (8, 1, 64), (9, 3, 64)])
# The number that the kernel chooses (None) takes the interpreter longest; test_random_mixes uses it too.
@pytest.mark.parametrize("splits", [pytest.param(None, marks=pytest.mark.slow), 1, 4])
def test_decode(heads: int, kv_heads: int, dim: int, splits: int | None, device: torch.device) -> None:
    starts = [0, 5, 63, 64, 200, 301]
    case = make_case(starts, [1] * len(starts), heads=heads, kv_heads=kv_heads, dim=dim, device=device, seed=dim)
    found = run_decode(case, dim**-0.5, None, None, splits)
    assert error(found, reference(case, dim**-0.5, None, None)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (17, None), (100, 30.0), (None, 5.0)])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_with_window_and_softcap(
    window: int | None, softcap: float | None, splits: int, device: torch.device
) -> None:
    case = make_case([0, 40, 255], [1, 1, 1], device=device, block_size=8)
    found = run_decode(case, 0.2, window, softcap, splits)
    assert error(found, reference(case, 0.2, window, softcap)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (17, None), (None, 64), (None, 50)])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_with_sinks_and_chunks(window: int | None, chunk: int | None, splits: int, device: torch.device) -> None:
    case = make_case([0, 40, 255, 256, 511], [1] * 5, device=device, block_size=8)
    case.chunk, case.sinks = chunk, 2 * torch.randn(4, device=device)
    assert error(run_decode(case, 0.2, window, None, splits), reference(case, 0.2, window, None)) < 1e-5


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (20, None), (None, 64), (None, 50)])
def test_prefill_with_sinks_and_chunks(window: int | None, chunk: int | None, device: torch.device) -> None:
    case = make_case([0, 90, 33, 128], [80, 40, 3, 70], device=device)
    case.chunk, case.sinks = chunk, 2 * torch.randn(4, device=device)
    assert error(run_prefill(case, 0.2, window, None), reference(case, 0.2, window, None)) < 1e-5


def test_decode_does_not_write_padding_rows(device: torch.device) -> None:
    case = make_case([10, 70], [1, 1], device=device)
    case.q = torch.cat((case.q, case.q[:1]))
    found = run_decode(case, 0.2, None, None, padding_rows=1)
    assert found[2].isnan().all()
    assert not found[:2].isnan().any()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (4, 2, 32), (6, 2, 24), (8, 1, 64)])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefill(heads: int, kv_heads: int, dim: int, block_size: int, device: torch.device) -> None:
    case = make_case(
        [0, 7, 100, 0], [70, 33, 5, 2], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, device=device
    )
    found = run_prefill(case, dim**-0.5, None, None)
    assert error(found, reference(case, dim**-0.5, None, None)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, None), (64, 30.0), (None, 5.0)])
def test_prefill_with_window_and_softcap(window: int | None, softcap: float | None, device: torch.device) -> None:
    case = make_case([0, 90, 33], [80, 40, 3], device=device)
    found = run_prefill(case, 0.2, window, softcap)
    assert error(found, reference(case, 0.2, window, softcap)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes in numpy, which has no bfloat16")
    scale = 64**-0.5
    decode = make_case([3, 150, 90], [1, 1, 1], heads=4, kv_heads=2, dim=64, dtype=dtype, device=device)
    assert error(run_decode(decode, scale, None, None, 2), reference(decode, scale, None, None)) < TOLERANCE[dtype]
    prefill = make_case([0, 50], [75, 9], heads=4, kv_heads=2, dim=64, dtype=dtype, device=device)
    assert error(run_prefill(prefill, scale, None, None), reference(prefill, scale, None, None)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 512), (torch.float16, 512), (torch.float16, 320)])
@pytest.mark.parametrize("window", [None, 40])
def test_wide_heads(dtype: torch.dtype, dim: int, window: int | None, device: torch.device) -> None:
    """As in Gemma 4, whose queries all share one key."""
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 1, "dim": dim, "dtype": dtype, "device": device}
    decode, prefill = make_case([3, 150, 90], [1, 1, 1], **shape), make_case([0, 50], [35, 9], **shape)
    for splits in (1, 2):
        found = run_decode(decode, dim**-0.5, window, None, splits)
        assert error(found, reference(decode, dim**-0.5, window, None)) < TOLERANCE[dtype]
    found = run_prefill(prefill, dim**-0.5, window, None)
    assert error(found, reference(prefill, dim**-0.5, window, None)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (150, None), (None, 5.0)])
def test_deep_prefill(window: int | None, softcap: float | None, device: torch.device) -> None:
    starts, counts = [0, 300, 517, 256], [70, 33, 5, 128]
    case = make_case(starts, counts, heads=4, kv_heads=2, dim=128, dtype=torch.float16, device=device)
    found = run_prefill(case, 128**-0.5, window, softcap, deep=True)
    assert error(found, reference(case, 128**-0.5, window, softcap)) < TOLERANCE[torch.float16]


def test_the_kernel_for_hopper_says_what_it_cannot_compute() -> None:
    shape: dict[str, Any] = {"heads": 14, "kv_heads": 2, "dim": 64, "dtype": torch.bfloat16}

    def found(cache: torch.dtype | None = None, parts: int = 1, **changes: Any) -> list[str]:
        queries = changes.pop("tile_queries", 16)
        scoring = Scoring(0.1, **{name: changes.pop(name, None) for name in ("window", "softcap", "chunk")})
        case = make_case([0], [32], **shape | changes, device=torch.device("cpu"))
        sides = (side.to(cache or side.dtype) for side in (case.keys, case.values))
        q, keys, values = (side.to(META) for side in (case.q, *sides))
        return obstacles(q, keys[..., ::parts, :], values[..., ::parts, :], queries, scoring)

    assert found() == found(heads=32, kv_heads=8, dim=128, tile_queries=32) == found(block_size=128) == []
    assert found(dtype=torch.float32) == ["it computes in 16 bits, not in torch.float32"]
    assert found(cache=torch.float8_e4m3fn) == ["the cache is in torch.float8_e4m3fn"]
    assert found(dim=96) == ["heads have 96 numbers, not 64 or 128"]
    assert found(tile_queries=8) == ["tiles of queries have 64 rows, not 128"]
    assert found(block_size=8) == ["blocks have 8 tokens, not 16, 32, 64 or 128"]
    assert "the cache is not contiguous" in found(parts=2)
    assert found(window=4096) == ["attention is limited to a window"]
    assert found(chunk=8192) == ["attention is limited to chunks of positions"]
    assert found(softcap=30.0, window=9) == ["attention is limited to a window", "scores are soft-capped"]


def test_kernels_in_gluon_are_for_hopper_and_a_triton_that_they_ran_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with described_gpu(known_gpu("h200")):
        assert hopper_obstacle(META) is None
        monkeypatch.setattr(triton, "__version__", "3.9.1")
        assert hopper_obstacle(META) == "it was tested with Triton 3.6.x, not 3.9.1"
    for gpu in ("a100", "l4"):
        with described_gpu(known_gpu(gpu)):
            assert hopper_obstacle(META) == "it runs on GPUs of compute capability 9.0"
    assert hopper_obstacle(torch.device("cpu")) == "it runs on GPUs of compute capability 9.0"


def test_large_tiles_are_for_deep_contexts_where_they_fit() -> None:
    hopper, smaller, half = 232_448, 166_912, torch.bfloat16
    assert _key_tile(128, 128, half, hopper, deep=True) == DEEP_TILE
    usual = _key_tile(128, 128, half, hopper, deep=False)
    assert usual.keys < DEEP_TILE.keys
    assert _key_tile(256, 128, half, hopper, deep=True) == usual, "many heads that share their keys"
    assert _key_tile(128, 128, half, smaller, deep=True) == usual
    assert _key_tile(64, 64, half, hopper, deep=True) == _key_tile(64, 256, half, hopper, deep=True) == usual
    assert _key_tile(32, 128, torch.float32, hopper, deep=True).stages == 1


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 3))])
def test_random_mixes(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    options = {
        "heads": kv_heads * rng.choice([1, 2, 3, 5]),
        "kv_heads": kv_heads,
        "dim": rng.choice([16, 32, 40, 64]),
        "block_size": rng.choice([4, 16, 64]),
    }
    starts = [rng.randint(0, 180) for _ in range(5)]
    decode = make_case(starts, [1] * 5, device=device, seed=seed, **options)
    assert error(run_decode(decode, 0.3, None, None), reference(decode, 0.3, None, None)) < 1e-5
    prefill = make_case(starts, [rng.randint(1, 60) for _ in starts], device=device, seed=seed, **options)
    assert error(run_prefill(prefill, 0.3, None, None), reference(prefill, 0.3, None, None)) < 1e-5


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "pairs"), [(4, 2, 16, 8), (6, 2, 32, 4), (3, 1, 24, 0)])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (2, 20)])
def test_decode_from_the_projection(
    heads: int, kv_heads: int, dim: int, pairs: int, splits: int, window: int | None, early: bool, device: torch.device
) -> None:
    tiling = DecodeTiling(16, 16, 4, 2, early=early)
    check_fused_decode(heads, kv_heads, dim, pairs, splits, window, tiling, device)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("new_heads", "v_norm"), [(2, True), (1, False), (1, True), (0, False)])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (2, 20)])
def test_decode_from_other_projections(
    new_heads: int, v_norm: bool, splits: int, window: int | None, early: bool, device: torch.device
) -> None:
    """Values that are normalised or are the keys, and keys and values that an earlier layer has stored."""
    tiling = DecodeTiling(16, 16, 4, 2, early=early)
    check_fused_decode(6, 2, 24, 8, splits, window, tiling, device, new_heads=new_heads, v_norm=v_norm)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 40, 600])
def test_one_scratch_has_room_for_every_batch_size(kv_heads: int) -> None:
    scratch = Scratch(kv_heads, kv_heads, 2, torch.device("cpu"))
    for long in (False, True):
        cut = {rows: splits for rows in range(1, 2000) if (splits := decode_splits(rows, kv_heads, long=long)) > 1}
        assert cut
        assert all(rows * splits <= len(scratch.partial) for rows, splits in cut.items())
        assert all(rows * kv_heads <= len(scratch.arrived) for rows in cut)


def test_a_long_context_has_more_splits() -> None:
    usual, long = ({rows: decode_splits(rows, 8, long=kind) for rows in (1, 16, 32, 64, 128, 256)} for kind in (0, 1))
    assert usual == {1: 32, 16: 2, 32: 1, 64: 1, 128: 2, 256: 1}
    assert long == {1: 32, 16: 2, 32: 8, 64: 4, 128: 2, 256: 1}


@pytest.mark.parametrize("invariant_for", [None, 256])
@pytest.mark.parametrize("shape", [{"sinks": True}, {"sinks": True, "window": 9}, {"chunk": 20}])
def test_the_backend_passes_on_what_a_layer_has(
    shape: dict[str, Any], invariant_for: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes and chunks in one batch equal the formula."""
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)  # more splits take the interpreter long
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, **shape)
    starts, ends = [30, 0, 41, 17], [31, 1, 60, 19]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    offsets = [sum(counts[:i]) for i in range(5)]
    tables = torch.arange(4 * 8, dtype=torch.int32, device=device).flip(0).view(4, 8)
    slots = [int(tables[i, at // 8]) * 8 + at % 8 for i in range(4) for at in range(starts[i], ends[i])]
    layout = RaggedLayout(offsets, starts, ends, tables, torch.tensor(slots, device=device))
    torch.manual_seed(0)
    cached = [torch.randn(33, 8, 2, 16, device=device) for _ in range(2)]
    q, k, v = (torch.randn(sum(counts), heads, 16, device=device) for heads in (4, 2, 2))
    sinks = torch.randn(4, device=device) if layer.sinks else None
    outputs = []
    for backend in (BurstedAttention(), PagedGPUAttention(invariant_for)):
        storage = KVStorage(*([side.clone()] for side in cached))
        batch = StepBatch(torch.zeros(len(q)), layout.slot_mapping, layout)
        outputs.append(backend.begin(batch, storage).attend(layer, q, k, v, sinks=sinks))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
