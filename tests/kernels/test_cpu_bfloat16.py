"""Products with weights in bfloat16 against exact arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from chairlift.kernels.cpu.bfloat16 import COLUMNS, MOST_ROWS, PANELS, HalfRows, HalfWeight, half_tile, round_half_row
from chairlift.kernels.cpu.decoder import linear
from chairlift.kernels.cpu.simd import HAS_BF16
from chairlift.kernels.cpu.weights import multiplied


@pytest.mark.parametrize("by_pairs", [True, False], ids=["dot-product instruction", "float32"])
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_tiles_are_exact(rows: int, by_pairs: bool) -> None:
    """All products and sums of small integers are exact."""
    if by_pairs and not HAS_BF16:
        pytest.skip("this CPU has no AVX-512 BF16")
    depth, random = 66, np.random.default_rng(rows)
    weight, x = (random.integers(-128, 129, (count, depth)).astype(np.float32) for count in (COLUMNS, rows))
    packed, rounded = HalfWeight.empty(1, COLUMNS, depth).layer(0), HalfRows.empty(rows, depth)
    packed.fill(weight)
    for row in range(rows):
        round_half_row(x[row], rounded, row)
    tile, strides = half_tile(rows, PANELS, by_pairs=by_pairs), (rounded.numbers.strides[0], packed.numbers.strides[0])

    @njit
    def run(sums: Any, left: Any, weight: Any) -> None:
        tile(sums.ctypes.data, left.ctypes.data, strides[0], weight.ctypes.data, strides[1], depth // 2)

    sums = np.full((rows, COLUMNS), np.nan, dtype=np.float32)
    run(sums, rounded.numbers, packed.numbers)
    assert np.array_equal(sums, x.astype(np.int64) @ weight.astype(np.int64).T)


def packed_weight(weight: torch.Tensor) -> HalfWeight:
    packed = HalfWeight.empty(1, *weight.shape).layer(0)
    packed.fill(weight.numpy())
    return packed


def product(x: torch.Tensor, weight: HalfWeight, bias: torch.Tensor | None, channels: int) -> torch.Tensor:
    return multiplied(linear, x, weight, bias, channels)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 210),
    depth=st.integers(1, 150),
    channels=st.integers(1, 200),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_equal_those_of_the_rounded_numbers(
    rows: int, depth: int, channels: int, biased: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(count, depth, generator=generator) for count in (rows, channels))
    bias = torch.randn(channels, generator=generator) if biased else None
    found = product(x, packed_weight(weight), bias, channels)
    expected = x.bfloat16().double() @ weight.bfloat16().double().T
    sizes = x.bfloat16().double().abs() @ weight.bfloat16().double().abs().T + 1
    if bias is not None:
        expected += bias
    assert ((found - expected).abs() / sizes).max() < 1e-6


def test_a_row_does_not_depend_on_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 160, generator=generator) for count in (13, 100))
    packed = packed_weight(weight)
    together = product(x, packed, None, 100)
    assert torch.equal(together, torch.cat([product(row[None], packed, None, 100) for row in x]))
