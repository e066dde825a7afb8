"""Products with 4-bit weights, fused with a norm before and a gate or an addition after, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.int4.matrix import Int4Matrix, dequantized, store
from chairlift.kernels.triton.int4.product import Int4Tiling, choose_int4_tiling, dequantize, int4_product

EPS = 1e-6


def make(
    rows: int, columns: int, group: int, offsets: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Int4Matrix, Tensor]:
    """A random matrix, and its values in float64 by the formula of the format."""
    numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    scales = (torch.rand(rows, columns // group, device=device) * 0.01 - 0.005).to(dtype)
    shifts = (torch.randn(rows, columns // group, device=device) * 0.03).to(dtype) if offsets else None
    of_column = torch.arange(columns, device=device) // group
    steps = numbers.double() - (0 if offsets else 8)
    values = steps * scales.double()[:, of_column] + (0.0 if shifts is None else shifts.double()[:, of_column])
    return store(numbers, scales, shifts, group), values


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_in_full(group: int, offsets: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(group)
    for columns in (group, 3 * group, 512):  # chunks that are not full, and full ones
        matrix, values = make(48, columns, group, offsets, dtype, device)
        assert error(dequantized(matrix), values) < 1e-6
        assert error(dequantize(matrix, torch.float32), values) < 1e-6


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize(("rows", "depth", "group"), [(1, 160, 32), (5, 512, 64), (20, 384, 128), (70, 256, 32)])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("splits", [1, 2])
def test_product(rows: int, depth: int, group: int, kind: str, few: bool, splits: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    gated, added = kind == "gated", kind == "added"
    columns = 80
    matrix, values = make(columns * (1 + gated), depth, group, depth != 512, torch.bfloat16, device)
    x = torch.randn(rows, depth, device=device).half()
    squares = None if added else torch.rand(rows, 3, device=device) * depth
    bias = torch.randn(columns, device=device).half() if kind == "plain" else None
    norm = torch.rand(columns, device=device).half() if added else None
    before = torch.randn(rows, columns, device=device).half()
    y = x.double() @ values.T
    if squares is not None:
        y *= torch.rsqrt(squares.double().sum(1, keepdim=True) / depth + EPS)
    if bias is not None:
        y += bias.double()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    height = 8 if rows <= 8 else 32 if rows <= 32 else 64
    tiling = Int4Tiling(height, 64, splits, 3, 4, few=few)
    for _ in range(2):  # the second run meets the scratch memory of the first
        total = before.clone() if added else None
        found, sums, scaled = int4_product(
            x, matrix, squares=squares, eps=EPS, bias=bias, gated=gated, add_to=total, next_norm=norm, tiling=tiling
        )
        assert error(found, y + before.double() if added else y) < 1e-3
        if added:
            assert sums is not None
            assert scaled is not None
            assert norm is not None
            assert error(sums.sum(1), found.double().pow(2).sum(1)) < 1e-5
            assert error(scaled, found.double() * norm.double()) < 1e-3


@pytest.mark.parametrize(
    ("depth", "group", "offsets"), [(160, 32, True), (256, 32, False), (512, 64, True), (384, 128, False)]
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_dequantized_weights_in_one_sum(
    depth: int, group: int, offsets: bool, gated: bool, splits: int, device: torch.device
) -> None:
    """Gate and up share a tile; dequantized weights have the precision of the activations."""
    torch.manual_seed(depth)
    columns, rows = 80, 70  # neither fills its tiles
    matrix, values = make(columns * (1 + gated), depth, group, offsets, torch.float16, device)
    x = torch.randn(rows, depth, device=device).half()
    y = x.double() @ values.T
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    for joint in (False, True) if gated else (False,):
        tiling = Int4Tiling(64, 128, splits, 3, 4, few=False, described=True, direct=True, joint=joint)
        assert error(int4_product(x, matrix, gated=gated, tiling=tiling)[0], y) < 1e-3


@pytest.mark.parametrize(("rows", "group"), [(1, 32), (1, 128), (9, 32), (17, 128), (33, 32), (100, 32), (130, 128)])
def test_every_chosen_tiling(rows: int, group: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    for gated in (False, True):
        matrix, values = make(96, 1024, group, True, torch.float16, device)
        x = torch.randn(rows, 1024, device=device).half()
        y = x.double() @ values.T
        if gated:
            gate, up = y.chunk(2, dim=1)
            y = torch.nn.functional.silu(gate) * up
        # A single row is added up in float16 for up to eight products on a GPU.
        assert error(int4_product(x, matrix, gated=gated)[0], y) < (2.5e-3 if rows == 1 else 1e-3)


def test_rows_do_not_depend_on_their_number(device: torch.device) -> None:
    matrix, _ = make(64, 512, 32, True, torch.float16, device)
    x = torch.randn(70, 512, device=device).half()
    whole = int4_product(x, matrix, invariant=True)[0]
    for some in (slice(0, 1), slice(3, 20), slice(60, 70)):
        assert torch.equal(int4_product(x[some].contiguous(), matrix, invariant=True)[0], whole[some])


def test_small_products_are_split_and_large_ones_are_not() -> None:
    assert choose_int4_tiling(1, 1024, 8192, False, 32).splits > 1
    assert choose_int4_tiling(1, 128_256, 4096, False, 32).splits == 1
    assert choose_int4_tiling(1, 1024, 256, False, 32).splits == 1  # too short
