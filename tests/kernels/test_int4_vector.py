"""Products of a single row with 4-bit weights without tensor cores, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.int4 import vector
from chairlift.kernels.triton.int4.matrix import Int4Matrix
from chairlift.kernels.triton.int4.product import (
    Int4VectorTiling,
    choose_int4_vector_tiling,
    int4_product,
    int4_vector_product,
)
from chairlift.kernels.triton.launch import generic_kernels
from tests.kernels.ptx import execute
from tests.kernels.test_triton_int4 import EPS, error, make

# The interpreter truncates to bfloat16. GPUs add up to eight products in float16, which the interpreter does not: up to
# 0.0019 with a gate, half of it without, on an H200.
TOLERANCE = {torch.float16: 2.5e-3, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_single_row(kind: str, group: int, offsets: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(group)
    gated, added = kind == "gated", kind == "added"
    columns, depth = 80, 2304  # the last tiles are not full
    matrix, values = make(columns * (1 + gated), depth, group, offsets, dtype, device)
    x, before = torch.randn(1, depth, device=device).to(dtype), torch.randn(1, columns, device=device).to(dtype)
    squares = None if added else torch.rand(1, 3, device=device) * depth
    bias = None if gated else torch.randn(columns, device=device).to(dtype)
    norm = torch.rand(columns, device=device).to(dtype) if added else None
    y = x.double() @ values.T
    if squares is not None:
        y *= torch.rsqrt(squares.double().sum(1, keepdim=True) / depth + EPS)
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    y += (0.0 if bias is None else bias.double()) + (before.double() if added else 0.0)
    for tiling in (Int4VectorTiling(8, 1024, 1, 2), Int4VectorTiling(4, 2048, 2, 1), Int4VectorTiling(16, 4096, 4, 2)):
        found, sums, scaled = int4_vector_product(
            x, matrix, tiling, squares=squares, eps=EPS, bias=bias, gated=gated,
            add_to=before.clone() if added else None, next_norm=norm,
        )  # fmt: skip
        assert error(found, y) < TOLERANCE[dtype]
        if added:
            assert sums is not None
            assert scaled is not None
            assert norm is not None
            assert sums.shape == (1, columns // tiling.columns)
            assert error(sums.sum(1), found.double().pow(2).sum(1)) < 1e-5
            assert error(scaled, found.double() * norm.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_few_large_activations(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    matrix, values = make(32, 1024, 128, False, torch.bfloat16, device)
    x = torch.randn(1, 1024, device=device)
    x[0, ::100] *= 1e4
    x = x.to(dtype)
    found = int4_vector_product(x, matrix, Int4VectorTiling(8, 1024, 1, 1))[0]
    assert error(found, x.double() @ values.T) < TOLERANCE[dtype]


def test_products_of_a_single_row_are_chosen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_int4_vector_tiling(80, 384, 128, False, False) is None  # a chunk is not full
    assert choose_int4_vector_tiling(80, 384, 32, True, False) is not None
    assert choose_int4_vector_tiling(8, 512, 128, False, True) is None  # gate and up share a panel
    assert choose_int4_vector_tiling(4096, 2**17, 128, False, False) is None  # the loop would be too long
    assert choose_int4_vector_tiling(14336, 4096, 32, True, True) is None  # slower than with tensor cores
    for depth in (512, 1024, 2048, 4096, 14336, 53248):
        for has_offsets in (False, True):
            tiling = choose_int4_vector_tiling(4096, depth, 128, has_offsets, False)
            assert tiling is not None
            assert tiling.depth >= 1024 * tiling.warps
            assert depth <= 16 * tiling.depth
    used: list[Int4VectorTiling] = []

    def recorded(*args: object, **options: object) -> tuple[Tensor, None, None]:
        used.append(args[2])  # type: ignore[arg-type]
        return torch.empty(0), None, None

    monkeypatch.setattr("chairlift.kernels.triton.int4.product.int4_vector_product", recorded)
    matrix, values = make(64, 1024, 128, False, torch.float16, device)
    x = torch.randn(2, 1024, device=device).half()
    int4_product(x[:1], matrix)
    assert used == [choose_int4_vector_tiling(64, 1024, 128, False, False)]
    with generic_kernels():
        assert error(int4_product(x[:1], matrix)[0], x[:1].double() @ values.T) < 1e-3
    int4_product(x[:1], matrix, invariant=True)
    int4_product(x, matrix)
    assert len(used) == 1


def _threads(matrix: Int4Matrix) -> np.ndarray:
    """What each thread reads of each row: int64 [rows, chunks, threads, 2]."""
    words = matrix.words.transpose(1, 2).contiguous().view(torch.int64).numpy()
    return words.reshape(matrix.rows, words.shape[2], -1, 2).view(np.uint64)


def _scaled(x: list[np.ndarray], half: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """`_scaled_halves` or `_scaled_bfloats`."""
    text = vector.PEAK_OF_HALVES if half else vector.PEAK_OF_BFLOATS
    peak = execute(text.value, 2, x)[0].astype(np.int64)
    if half:
        first, second = np.minimum(0xA800 - peak, 0x7800), np.maximum(0x3000 - peak, 0) + 0x3C00
        factors = [[first, second - 0x1000 * (i // 2 % 2)] for i in range(8)]
        inverse = np.exp2((peak >> 10) - 27.0)
        text = vector.SCALE_HALVES
    else:
        factors = [[0x8500 - 0x200 * (i // 2 % 2) - peak] for i in range(8)]
        inverse = np.exp2((peak >> 7) - 139.0)
        text = vector.SCALE_BFLOATS
    pairs = [[(each * 0x10001).astype(np.uint32) for each in some] for some in factors]
    return [execute(text.value, 1, [each, *some])[0] for each, some in zip(x, pairs, strict=True)], inverse


def _halves_added(sums: np.ndarray) -> np.ndarray:
    low, high = (
        each.view(np.float16).astype(np.float64) for each in (sums.astype(np.uint16), (sums >> 16).astype(np.uint16))
    )
    return np.add(low, high)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", ["one", "outliers", "large", "small"])
def test_the_arithmetic_of_the_gpu(group: int, offsets: bool, dtype: torch.dtype, size: str) -> None:
    """The PTX of the kernel, executed in numpy for every thread."""
    torch.manual_seed(group)
    rows, depth = 64, 2048
    matrix, values = make(rows, depth, group, offsets, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(1, depth)
    x[0, ::100] *= 1e4 if size == "outliers" else 1.0
    x[0, 128:300] = 0.0
    x = (x * {"large": 1e4, "small": 1e-4}.get(size, 1.0)).to(dtype)
    words, groups = _threads(matrix), 4 * matrix.run // group
    runs = x.view(torch.int64).numpy().view(np.uint64).reshape(words.shape[1], 4, words.shape[2], 2)
    scaled, inverse = _scaled([runs[:, j, :, i] for j in range(4) for i in range(2)], dtype is torch.float16)
    sums = execute((vector.SUMS_OF_TWO if groups == 2 else vector.SUMS_OF_FOUR).value, groups, scaled)
    begin = [np.zeros_like(each) if offsets else _minus_eight(each) for each in sums]
    wide = [np.broadcast_to(each, words.shape[:3]) for each in [*scaled, *begin]]
    text = vector.PRODUCTS_OF_TWO if groups == 2 else vector.PRODUCTS_OF_FOUR
    products = execute(text.value, groups, [words[..., 0], words[..., 1], *wide])
    total = np.zeros(rows)
    halves = matrix.scales.t().contiguous().view(torch.bfloat16).double().numpy().reshape(rows, words.shape[1], -1)
    for i, product in enumerate(products):
        part = product.view(np.float32).astype(np.float64) * 2.0**24 * inverse
        total += (part * halves[:, :, 2 * i if offsets else i, None]).sum((1, 2))
        if offsets:
            total += (_halves_added(sums[i]) * inverse * halves[:, :, 2 * i + 1, None]).sum((1, 2))
    assert error(torch.from_numpy(total)[None], x.double() @ values.T) < 1.5e-3


def _minus_eight(sums: np.ndarray) -> np.ndarray:
    return execute("mov.b32 t, 0x80088008; mul.rn.f16x2 $0, $1, t;", 1, [sums])[0]
