"""Products fused with a norm before and a gate or an addition after, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows, spare_rows
from chairlift.kernels.triton.products.product import product
from chairlift.kernels.triton.products.tiling import ProductTiling, choose_tiling, fitting, is_faster, num_stages

EPS = 1e-6


def expected(x: Tensor, weight: Tensor, squares: Tensor | None, bias: Tensor | None, gated: bool) -> Tensor:
    y = x.double() @ weight.double().T
    if squares is not None:
        y *= torch.rsqrt(squares.double().sum(1, keepdim=True) / x.shape[1] + EPS)
    if bias is not None:
        y += bias.double()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    return y


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


SIZES = [(1, 96, 128), (5, 100, 136), (32, 64, 256), (70, 128, 192), (130, 40, 64)]


@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("described", [False, True])
def test_product(
    rows: int, columns: int, depth: int, kind: str, splits: int, described: bool, device: torch.device
) -> None:
    torch.manual_seed(rows)
    gated, added = kind == "gated", kind == "added"
    x = torch.randn(rows, depth, device=device).half()
    weight = (torch.randn(columns * (1 + gated), depth, device=device) / depth**0.5).half()
    squares = None if added else torch.rand(rows, 3, device=device) * depth
    bias = torch.randn(columns, device=device).half() if kind == "plain" else None
    before = torch.randn(rows, columns, device=device).half()
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiling = ProductTiling(height, 64, 64, splits, 3, prefetch=64, described=described)
    wanted = expected(x, weight, squares, bias, gated) + (before.double() if added else 0.0)
    for _ in range(2):  # the second run meets the scratch memory of the first
        total = before.clone() if added else None
        found, sums = product(x, weight, squares=squares, eps=EPS, bias=bias, gated=gated, add_to=total, tiling=tiling)
        assert error(found, wanted) < 1e-3
        if added:
            assert sums is not None
            assert error(sums.sum(1), found.double().pow(2).sum(1)) < 1e-5


@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_activations(rows: int, splits: int, gated: bool, device: torch.device) -> None:
    """With a second half of the product, or with numbers that lie within longer rows."""
    columns, depth = 100, 192
    x = torch.randn(rows, depth, device=device).half()
    weight = (torch.randn(columns * (1 + gated), depth, device=device) / 8).half()
    times = torch.randn(rows, 3, columns, device=device).half()[:, 1]
    tiling = ProductTiling(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 64, splits, 3)
    what: dict[str, Any] = {"gated": True} if gated else {"times": times}
    found, _ = product(x, weight, activation="gelu_tanh", tiling=tiling, **what)
    y = x.double() @ weight.double().T
    first, second = y.chunk(2, dim=1) if gated else (y, times.double())
    assert error(found, torch.nn.functional.gelu(first, approximate="tanh") * second) < 1e-3


@pytest.mark.parametrize("size", [(1024, 3072, 2048, 4096, 151_936), (4096, 14_336, 4096, 6144, 128_256)])
def test_tiles_stay_inside_tensors_with_spare_rows(size: tuple[int, ...]) -> None:
    hidden, inner, heads, qkv, vocab = size
    products = [(qkv, hidden, False), (hidden, heads, False), (inner, hidden, True), (hidden, inner, False)]
    for rows in range(1, 257):
        for columns, depth, gated in [*products, (vocab, hidden, False)]:
            tiling = choose_tiling(rows, columns, depth, gated)
            tiled = -(-rows // tiling.rows) * tiling.rows
            assert not tiling.described or tiled <= spare_rows(rows), (rows, columns, depth)


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_spare_rows_do_not_affect_the_result(rows: int, device: torch.device) -> None:
    """Tiles extend into the spare rows, which may hold anything."""
    torch.manual_seed(rows)
    x = empty_rows(rows, 64, dtype=torch.float16, device=device)
    room = x.as_strided((spare_rows(rows), 64), (64, 1))
    room.fill_(torch.nan)
    x.copy_(torch.randn(rows, 64))
    weight = torch.randn(96, 64, device=device).half() / 8
    tiling = ProductTiling(64, 32, 64, 1, 3, described=True)
    before = torch.randn(rows, 96, device=device).half()
    total = empty_rows(rows, 96, dtype=torch.float16, device=device).copy_(before)
    behind = total.as_strided((spare_rows(rows), 96), (96, 1))[rows:].fill_(7.0)
    found, sums = product(x, weight, add_to=total, tiling=tiling)
    assert error(found, before.double() + x.double() @ weight.double().T) < 1e-3
    assert sums is not None
    assert error(sums.sum(1), found.double().pow(2).sum(1)) < 1e-5
    assert bool((behind == 7.0).all())


CHOSEN = [
    (1, 64, 304),
    (3, 40, 1024),
    (17, 33, 2112),
    (70, 2112, 264),
    (100, 200, 1032),
    (200, 48, 64),
    (200, 2080, 72),
]


@pytest.mark.parametrize(("rows", "columns", "depth"), CHOSEN)
def test_the_chosen_tiles_are_right(rows: int, columns: int, depth: int, device: torch.device) -> None:
    x, weight = torch.randn(rows, depth, device=device).half(), torch.randn(columns, depth, device=device).half()
    assert error(product(x, weight)[0], x.double() @ weight.double().T) < 1e-3


@pytest.mark.parametrize("columns", [40, 264])
@pytest.mark.parametrize("rows", [7, 70, 200])
def test_the_tiles_of_large_weights_are_right(
    rows: int, columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights, with a gate and without."""
    monkeypatch.setattr("chairlift.kernels.triton.products.tiling.SMALL_WEIGHTS", 0)
    choose_tiling.cache_clear()
    x, weight = torch.randn(rows, 1032, device=device).half() / 30, torch.randn(2 * columns, 1032, device=device).half()
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert error(product(x, weight, gated=True)[0], torch.nn.functional.silu(gate) * up) < 2e-3
    assert error(product(x, weight)[0], torch.cat((gate, up), dim=1)) < 1e-3
    choose_tiling.cache_clear()


def test_tiles_shrink_until_two_of_them_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs with 99 KiB of shared memory per program, or less."""
    wide = ProductTiling(128, 64, 128, 1, 4, described=True)
    gated = ProductTiling(128, 128, 64, 1, 4, described=True)
    chip, half = torch.device("cuda"), torch.bfloat16
    for size, depth, stages in ((2**20, 128, 4), (101_376, 64, 3), (50_000, 64, 1)):
        for cached in (fitting, num_stages):
            cached.cache_clear()
        monkeypatch.setattr("chairlift.kernels.triton.products.tiling.shared_memory", lambda device, size=size: size)
        fitted = fitting(wide, False, half, half, chip)
        assert (fitted.depth, fitted.columns) == (depth, 64)
        assert num_stages(fitted, False, half, half, chip) == stages
        assert fitting(gated, True, half, half, chip).columns == (128 if size == 2**20 else 64)
    for cached in (fitting, num_stages):
        cached.cache_clear()


def test_few_columns_are_left_to_cublas_where_they_do_not_fill_the_gpu() -> None:
    assert is_faster(224, 4096, 4096, gated=False)
    assert not is_faster(225, 4096, 4096, gated=False)
    assert is_faster(96, 2048, 8192, gated=False)
    assert not is_faster(97, 2048, 8192, gated=False)
    assert choose_tiling(96, 2048, 8192, gated=False).columns > choose_tiling(96, 4096, 4096, gated=False).columns
