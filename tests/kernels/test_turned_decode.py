"""Attention of single tokens over an 8-bit cache with keys and values as the left operand, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.decode import DecodeTiling, _decode_tiling
from chairlift.kernels.triton.launch import generic_kernels
from tests.kernels.attention_cases import AttentionCase, check_fused_decode, error, make_case, reference, run_decode

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
TILING = DecodeTiling(32, 32, 1, 2, turned=True)
STARTS = [0, 31, 100]
CLOSE = 5e-4  # weights of the softmax are rounded to float16


def eight_bit_case(starts: list[int], device: torch.device, dtype: torch.dtype = BF16, **shape: Any) -> AttentionCase:
    case = make_case(starts, [1] * len(starts), dtype=dtype, device=device, **shape)
    case.keys, case.values = case.keys.to(FP8), case.values.to(FP8)
    return case


def attend(case: AttentionCase, scale: float, window: int | None = None, **options: Any) -> Tensor:
    """Results in float32, so that their rounding hides nothing."""
    out = torch.full(case.q.shape, float("nan"), device=case.q.device)
    softcap, splits = options.pop("softcap", None), options.pop("splits", 1)
    return run_decode(case, scale, window, softcap, splits, out=out, tiling=options.pop("tiling", TILING), **options)


@pytest.mark.parametrize(("splits", "ahead"), [(1, False), (3, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(2, 2, 64, BF16), (4, 2, 32, FP16), (4, 1, 128, BF16), (8, 1, 24, BF16), (5, 1, 256, FP16), (16, 1, 16, FP16)],
)
def test_shapes(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, splits: int, ahead: bool, device: torch.device
) -> None:
    case = eight_bit_case(STARTS, device, dtype, heads=heads, kv_heads=kv_heads, dim=dim)
    found = attend(case, dim**-0.5, splits=splits, tiling=TILING._replace(ahead=ahead))
    assert error(found, reference(case, dim**-0.5, None, None)) < CLOSE


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("window", "chunk", "softcap", "sinks"),
    [(1, None, None, False), (17, None, 30.0, True), (None, 50, None, True), (None, 64, 5.0, False)],
)
def test_windows_chunks_soft_caps_and_sinks(
    window: int | None, chunk: int | None, softcap: float | None, sinks: bool, splits: int, device: torch.device
) -> None:
    case = eight_bit_case([0, 40, 100, 127], device, kv_heads=1, block_size=8)
    case.chunk, case.sinks = chunk, 2 * torch.randn(4, device=device) if sinks else None
    found = attend(case, 0.2, window, softcap=softcap, splits=splits)
    assert error(found, reference(case, 0.2, window, softcap)) < CLOSE


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "pairs", "splits", "window"),
    [(4, 2, 32, 16, 1, None), (6, 2, 64, 4, 3, None), (8, 1, 24, 0, 2, 20)],
)
def test_from_the_projection(
    heads: int,
    kv_heads: int,
    dim: int,
    pairs: int,
    splits: int,
    window: int | None,
    early: bool,
    device: torch.device,
) -> None:
    tiling = TILING._replace(keys=16, min_split=16, early=early, ahead=early)
    options: dict[str, Any] = {"dtype": FP16, "cache": FP8, "tolerance": CLOSE}
    check_fused_decode(heads, kv_heads, dim, pairs, splits, window, tiling, device, **options)


@pytest.mark.parametrize("exponent", [-100, -16, 20, 126])
def test_queries_of_any_size(exponent: int, device: torch.device) -> None:
    """Heads beyond the range of float16, beside a smaller one and one of zeros."""
    case = eight_bit_case(STARTS, device, heads=4, kv_heads=1)
    size = case.q.abs().amax(dim=-1, keepdim=True)
    case.q = (case.q / size * 1.5).double()
    case.q[:, 0] *= 2.0**exponent
    case.q[:, 1] *= 2.0 ** (exponent + 1)
    case.q[:, 2] *= 2.0 ** min(exponent, 0)  # the reference has no scores beyond float64's exp
    case.q[:, 3] = 0.0
    case.q = case.q.to(BF16)
    assert case.q.isfinite().all()
    scale = 2.0 ** -max(-125, exponent)
    assert error(attend(case, scale), reference(case, scale, None, None)) < CLOSE


def test_small_weights_are_kept(device: torch.device) -> None:
    """One key has most of the weight, the others weights below the smallest number of float16 each."""
    case = eight_bit_case([300], device, heads=1, kv_heads=1)
    case.q, keys = torch.ones_like(case.q), torch.zeros(case.keys.shape, device=device)
    table = case.tables[case.slots[0]]
    values = torch.full(case.values.shape, 448.0, device=device)
    keys[table[2].item(), 3], values[table[2].item(), 3] = 1.0, 2.0**-6
    case.keys, case.values = keys.to(FP8), values.to(FP8)
    scale = 18.2 / 32  # exp(-18.2) is 2^-26.3
    expected = reference(case, scale, None, None)
    assert expected.min() > 1.1 * 2.0**-6, "the small weights matter"
    assert error(attend(case, scale), expected) < CLOSE


def test_largest_keys_and_values(device: torch.device) -> None:
    case = eight_bit_case([40, 99], device)
    case.keys, case.values = ((448 * each.float().sign()).to(FP8) for each in (case.keys, case.values))
    assert error(attend(case, 1e-3), reference(case, 1e-3, None, None)) < CLOSE


def test_nan_keys_are_seen(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter reads the NaN of e4m3 as 480")
    case = eight_bit_case([40, 99], device, heads=4, kv_heads=2)
    keys = case.keys.float()
    keys[case.tables[case.slots[1], 2].item(), 3, 0, 1] = float("nan")
    case.keys = keys.to(FP8)
    found = attend(case, 0.2)
    assert found[1, :2].isnan().all()
    assert found[0].isfinite().all()
    assert found[1, 2:].isfinite().all()


def test_where_it_is_used() -> None:
    """With 8-bit keys, queries in half precision, at most 8 query heads per key head, and more than a few rows."""

    def turned(rows: int, heads: int = 32, dim: int = 128, dtype: torch.dtype = BF16, cache: torch.dtype = FP8) -> bool:
        return _decode_tiling(rows, 8, heads // 8, dim, dtype, cache).turned

    assert [turned(rows) for rows in (1, 8, 9, 48, 64, 256)] == [False, False, True, True, True, True]
    assert turned(64, heads=8)
    assert turned(64, dim=64)
    assert turned(64, dtype=FP16)
    assert not turned(64, heads=128)
    assert not turned(64, dim=256)
    assert not turned(64, dtype=torch.float32)
    assert not turned(64, cache=BF16)
    with generic_kernels():
        assert not turned(64)


@pytest.mark.slow  # takes the interpreter long
def test_it_is_used_by_itself(device: torch.device) -> None:
    case = eight_bit_case([3, 150, 600, 0, 127, 128, 129, 31, 64], device, heads=8, kv_heads=8)
    assert _decode_tiling(9, 8, 1, 32, BF16, FP8).turned
    assert error(attend(case, 0.2, splits=None, tiling=None), reference(case, 0.2, None, None)) < CLOSE
