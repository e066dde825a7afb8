"""Batch-invariant kernels: correct against float64, and bit-identical in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton import invariant as triton_invariant
from chairlift.kernels.triton.invariant import invariant_linear
from chairlift.kernels.triton.invariant_attention import (
    SpanScratch,
    invariant_attention,
    queries_per_tile,
    small_tiles_agree,
)
from chairlift.kernels.triton.products import product as triton_product
from chairlift.kernels.triton.products.product import product
from tests.kernels.attention_cases import TOLERANCE, AttentionCase, as_ints, error, make_case, reference

# Triton's interpreter does not multiply bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize(("columns", "depth"), [(70, 40), (33, 1100)])
@pytest.mark.parametrize("residual", [False, True])
def test_linear(
    columns: int, depth: int, residual: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, parts in parallel and in sequence: the same bits."""
    x, weight = torch.randn(40, depth, device=device), torch.randn(columns, depth, device=device)
    bias = None if residual else torch.randn(columns, device=device)
    total = torch.randn(40, columns, device=device)
    expected = x.double() @ weight.double().T + (total if bias is None else bias).double()

    def product(rows: slice) -> Tensor:
        return invariant_linear(x[rows], weight, bias, add_to=total[rows].clone() if residual else None)

    whole = product(slice(None))
    assert error(whole, expected) < 1e-5
    for rows in (slice(0, 1), slice(39, 40), slice(3, 36)):
        assert product(rows).equal(whole[rows])
    monkeypatch.setattr(triton_invariant, "PARALLEL_ROWS", 0)
    assert product(slice(None)).equal(whole)


def attend(
    case: AttentionCase,
    *,
    longest: int,
    window: int | None,
    softcap: float | None,
    singles: bool,
    programs: int | None = None,
) -> Tensor:
    """Run the kernel, with `singles` through the launch for single tokens."""
    device = case.q.device
    _, heads, dim = case.q.shape
    kv_heads = case.keys.shape[2]
    queries = queries_per_tile(heads, kv_heads, dim, case.q.dtype)
    scratch = SpanScratch(len(case.slots) if singles else 1, heads, kv_heads, dim, longest, device)
    scratch.partial.fill_(float("nan"))
    scratch.best.fill_(float("nan"))
    scratch.total.fill_(float("nan"))
    tiles = [(i, at) for i, count in enumerate(case.counts) for at in range(0, count, queries)] + [(-1, 0)]
    out = torch.full_like(case.q, float("nan"))
    for _ in range(2 if singles else 1):  # the second run meets the scratch memory of the first
        invariant_attention(
            case.q,
            case.keys,
            case.values,
            out,
            tables=case.tables,
            tile_chunk=scratch.chunks if singles else as_ints([chunk for chunk, _ in tiles], device),
            tile_offset=scratch.offsets if singles else as_ints([at for _, at in tiles], device),
            tile_queries=queries,
            chunk_slot=as_ints(case.slots, device),
            chunk_row=as_ints(case.rows, device),
            chunk_start=as_ints(case.starts, device),
            chunk_count=as_ints(case.counts, device),
            scratch=scratch,
            singles=singles,
            small_tiles=small_tiles_agree(heads, kv_heads, dim, case.q.dtype, device),  # as an engine does
            programs=programs,
            scale=dim**-0.5,
            window=window,
            softcap=softcap,
            chunk=case.chunk,
            sinks=case.sinks,
        )
    assert not scratch.arrived.any()
    return out


def cut(case: AttentionCase, sequence: int, first: int, count: int) -> AttentionCase:
    """A run of tokens of one sequence, as a batch of its own."""
    row = case.rows[sequence] + first
    start = case.starts[sequence] + first
    return AttentionCase(
        case.q[row : row + count],
        case.keys,
        case.values,
        case.tables,
        [case.slots[sequence]],
        [start],
        [count],
        case.chunk,
        case.sinks,
    )


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap", "chunk"),
    [
        (2, 1, 32, None, None, None),
        pytest.param(6, 2, 24, 50, 30.0, None, marks=pytest.mark.slow),
        (2, 1, 32, None, None, 40),
    ],
)
def test_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, in chunks and token by token, over several spans that any number of programs share: the same bits."""
    span = 32 if dtype is torch.float32 else 64  # positions that are read at once
    monkeypatch.setattr("chairlift.kernels.triton.invariant_attention.SHORTEST_SPAN", span)
    options = {"longest": 128, "window": window, "softcap": softcap}
    case = make_case([0, 45], [40, 22], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device=device)
    case.chunk, case.sinks = chunk, torch.randn(heads, device=device) if window or chunk else None
    whole = attend(case, **options, singles=False)
    assert error(whole, reference(case, dim**-0.5, window, softcap)) < TOLERANCE[dtype]
    for sequence, first, count in ((0, 13, 20), (1, 1, 20), (1, 20, 1)):
        row = case.rows[sequence] + first
        part = cut(case, sequence, first, count)
        assert attend(part, **options, singles=False).equal(whole[row : row + count])
        for programs in (1, 2, 3, None) if count == 1 else ():
            assert attend(part, **options, singles=True, programs=programs).equal(whole[row : row + 1])


@pytest.mark.slow
def test_single_tokens_share_a_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.invariant_attention.SHORTEST_SPAN", 32)
    options = {"longest": 128, "window": None, "softcap": None}
    case = make_case([0, 31, 90], [1, 1, 1], device=device)
    together = attend(case, **options, singles=True)
    assert error(together, reference(case, 32**-0.5, None, None)) < 1e-5
    for sequence in range(3):
        alone = attend(cut(case, sequence, 0, 1), **options, singles=True)
        assert alone.equal(together[sequence : sequence + 1])


def test_the_launch_for_single_tokens_skips_longer_chunks(device: torch.device) -> None:
    case = make_case([0, 5], [1, 3], device=device)
    found = attend(case, longest=64, window=None, softcap=None, singles=True)
    assert not found[0].isnan().any()
    assert found[1:].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 32), (8, 2, 64), (6, 1, 24)])
def test_small_tiles_agree(heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("this is a property of the GPU, which engines find out")
    assert small_tiles_agree(heads, kv_heads, dim, torch.float16, device)


@pytest.mark.parametrize(("columns", "depth", "gated"), [(96, 1040, False), (70, 2048, False), (40, 1040, True)])
@pytest.mark.parametrize("kind", ["plain", "normed", "added"])
def test_fused_products(
    columns: int, depth: int, gated: bool, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a fused product and their sums of squares, for any number of rows and in sequence: the same bits.

    Sums of squares have one order only if rows are read and written 16 bytes at a time, as in all fused layers.
    """
    if gated and kind == "added":
        pytest.skip("no layer has it")
    torch.manual_seed(depth)
    x = torch.randn(150, depth, device=device).half()
    weight = (torch.randn(columns * (1 + gated), depth, device=device) * depth**-0.5).half()
    squares = torch.rand(150, 3, device=device) * depth if kind == "normed" else None
    total = torch.randn(150, columns, device=device).half()

    def made(rows: slice) -> tuple[Tensor, ...]:
        add_to = total[rows].clone() if kind == "added" else None
        some = None if squares is None else squares[rows]
        return tuple(
            each
            for each in product(
                x[rows].clone(), weight, squares=some, eps=1e-6, gated=gated, add_to=add_to, invariant=True
            )
            if each is not None
        )

    whole = made(slice(None))
    wide = x.double()
    if squares is not None:
        wide = wide * torch.rsqrt(squares.double().sum(1, keepdim=True) / depth + 1e-6)
    expected = wide @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    assert error(whole[0], expected + total.double() if kind == "added" else expected) < TOLERANCE[torch.float16]
    for rows in (slice(0, 1), slice(149, 150), slice(3, 36), slice(0, 65)):
        for found, wanted in zip(made(rows), whole, strict=True):
            assert found.equal(wanted[rows])
    monkeypatch.setattr(triton_product, "PARALLEL_ROWS", 0)
    compared = slice(None) if columns % 16 == 0 else slice(1)
    for found, wanted in zip(made(slice(None))[compared], whole[compared], strict=True):
        assert found.equal(wanted)
