"""Batch-invariant kernels: correct against float64, and bit-identical in any batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.attention import Scoring
from chairlift.kernels.triton.decode import Fresh
from chairlift.kernels.triton.invariant_attention import (
    SpanScratch,
    invariant_attention,
    num_spans,
    queries_per_tile,
    span_begin,
    span_of,
)
from chairlift.kernels.triton.invariant_decode import (
    SingleTiling,
    can_begin_fresh,
    invariant_decode,
    small_tiles_agree,
)
from chairlift.kernels.triton.launch import next_power_of_2, pairwise_sum, spare_rows
from chairlift.kernels.triton.layers import rotate_and_store_
from chairlift.kernels.triton.products import invariant as triton_invariant
from chairlift.kernels.triton.products import product as triton_product
from chairlift.kernels.triton.products.invariant import invariant_linear
from chairlift.kernels.triton.products.product import product
from chairlift.kernels.triton.products.tiling import choose_invariant_tiling, invariant_splits
from tests.kernels.attention_cases import TOLERANCE, AttentionCase, as_ints, chunks_of, error, make_case, reference

agree = cache(small_tiles_agree)
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
    tiling: SingleTiling | None = None,
) -> Tensor:
    """Run the kernel of chunks, or with `singles` that of single tokens."""
    device = case.q.device
    _, heads, dim = case.q.shape
    kv_heads = case.keys.shape[2]
    queries = queries_per_tile(heads, kv_heads, dim, case.q.dtype)
    out = torch.full_like(case.q, float("nan"))
    scoring = Scoring(dim**-0.5, window, softcap, case.chunk, case.sinks)
    chunks = chunks_of(case, queries)
    if not singles:
        invariant_attention(case.q, case.keys, case.values, out, chunks, scoring)
        return out
    scratch = SpanScratch(heads, kv_heads, dim, longest, device)
    for each in (scratch.partial, scratch.best, scratch.total):
        each.fill_(float("nan"))
    small = agree(heads, kv_heads, dim, case.q.dtype, device)  # as an engine does
    for _ in range(2):  # the second run meets the scratch memory of the first
        invariant_decode(
            case.q,
            case.keys,
            case.values,
            out,
            tables=case.tables,
            row_slot=chunks.slot,
            row_start=chunks.start,
            row_count=chunks.count,
            scratch=scratch,
            scoring=scoring,
            tile_queries=1 if small else queries,
            programs=programs,
            tiling=tiling,
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
    monkeypatch.setattr("chairlift.kernels.triton.invariant_attention.SHORTEST_SPAN", 32)
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


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 2, 64), (6, 1, 24)])
def test_small_tiles_agree(heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("this is a property of the GPU, which engines find out")
    assert small_tiles_agree(heads, kv_heads, dim, torch.float16, device)


@pytest.mark.parametrize(("columns", "depth", "gated"), [(96, 1040, False), (70, 2048, False), (40, 1040, True)])
@pytest.mark.parametrize("kind", ["plain", "normed", "added"])
def test_fused_products(
    columns: int, depth: int, gated: bool, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a fused product and their sums of squares, for any number of rows and in sequence: the same bits."""
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
        found, sums = product(
            x[rows].clone(), weight, squares=some, eps=1e-6, gated=gated, add_to=add_to, invariant=True
        )
        return (found,) if sums is None else (found, summed_in_pairs(sums))

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
    monkeypatch.setattr(triton_product, "PARALLEL_ELEMENTS", 0)
    for found, wanted in zip(made(slice(None)), whole, strict=True):
        assert found.equal(wanted)


def summed_in_pairs(sums: Tensor) -> Tensor:
    """Sums of squares of parts of rows, added up as the next product does; tiles of any width have the same result."""
    sums = torch.nn.functional.pad(sums, (0, next_power_of_2(sums.shape[1]) - sums.shape[1]))
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums


@pytest.mark.parametrize(("hidden", "inner", "attended", "qkv"), [(1024, 3072, 2048, 4096), (4096, 14_336, 4096, 6144)])
def test_invariant_tiles_sum_in_one_order(hidden: int, inner: int, attended: int, qkv: int) -> None:
    """Splits depend on the weight alone, and their ends are ends of every tile."""
    products = [(qkv, hidden, False), (hidden, attended, False), (inner, hidden, True), (hidden, inner, False)]
    for columns, depth, gated in [*products, (151_936, hidden, False)]:
        for rows in (*range(1, 300), 1000, 5000, 20_000):
            tiling = choose_invariant_tiling(rows, columns, depth, gated)
            assert tiling.splits == invariant_splits(columns, depth, gated)
            assert triton_product.PART_UNIT % tiling.depth == 0
            tiled = -(-rows // tiling.rows) * tiling.rows
            assert not tiling.described or tiled <= spare_rows(rows), (rows, columns, depth)


@triton.jit
def _sum_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(out_ptr + m, pairwise_sum(tl.load(x_ptr + m[:, None] * N + n[None, :])))


def test_sums_in_pairs(device: torch.device) -> None:
    x, out = torch.randn(16, 64, device=device), torch.empty(16, device=device)
    _sum_kernel[(1,)](x, out, M=16, N=64)
    assert out.equal(summed_in_pairs(x)[:, 0])


@triton.jit
def _spans_kernel(span_ptr, begin_ptr, SPAN: tl.constexpr):
    position = tl.program_id(0)
    span = span_of(position, SPAN)
    tl.store(span_ptr + position, span)
    tl.store(begin_ptr + position, span_begin(span, SPAN))


def test_spans_grow_with_their_position(device: torch.device) -> None:
    span, begin = torch.empty(2, 1100, dtype=torch.int32, device=device)
    _spans_kernel[(1100,)](span, begin, SPAN=8)
    edges = [*range(0, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, 1024, 64), 1024]
    for position in range(1100):
        index = sum(edge <= position for edge in edges) - 1
        assert (span[position], begin[position]) == (index, edges[index])
        assert num_spans(position + 1, 8) == index + 1


@pytest.mark.parametrize(
    ("norms", "programs", "window"), [(False, 1, 40), (True, 1, None), (False, 3, None), (True, 3, 40)]
)
def test_single_tokens_from_the_projection(
    norms: bool, programs: int, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, rotation and the write to the cache in the kernel of single tokens: the bits of the separate kernels."""
    monkeypatch.setattr("chairlift.kernels.triton.invariant_attention.SHORTEST_SPAN", 64)
    heads, kv_heads, dim, starts = 4, 2, 32, [0, 31, 32, 70, 128, 135]
    case = make_case(
        starts, [1] * 6, heads=heads + 2 * kv_heads, kv_heads=kv_heads, dim=dim, dtype=torch.float16, device=device
    )
    angles = torch.randn(len(starts), 1, dim // 2, device=device)
    norm = torch.rand(dim, device=device).half() + 0.5 if norms else None
    fresh = Fresh(norm, norm, 1e-6, angles.cos().half(), angles.sin().half())
    assert can_begin_fresh(dim, fresh)
    check_single_tokens_from_the_projection(case, fresh, longest=256, programs=programs, window=window)


def check_single_tokens_from_the_projection(
    case: AttentionCase,
    fresh: Fresh,
    *,
    longest: int,
    programs: int | None = None,
    window: int | None = None,
) -> None:
    """Compare the kernel that begins with the projection, in `case.q`, with the separate kernels, bit by bit."""
    device, (rows, projected, dim), kv_heads = case.q.device, case.q.shape, case.keys.shape[2]
    heads = projected - 2 * kv_heads
    slots, positions = as_ints(case.slots, device), as_ints(case.starts, device)
    separate, keys, values = case.q.clone(), case.keys.clone(), case.values.clone()
    rotate_and_store_(
        separate.flatten(1),
        keys,
        values,
        fresh,
        num_heads=heads,
        slots=slots,
        positions=positions,
        tables=case.tables,
    )
    rotated = AttentionCase(separate[:, :heads], keys, values, case.tables, case.slots, case.starts, [1] * rows)
    wanted = attend(rotated, longest=longest, window=window, softcap=None, singles=False)
    found = torch.full_like(wanted, float("nan"))
    invariant_decode(
        case.q,
        case.keys,
        case.values,
        found,
        tables=case.tables,
        row_slot=slots,
        row_start=positions,
        row_count=torch.ones_like(slots),
        scratch=SpanScratch(heads, kv_heads, dim, longest, device),
        programs=programs,
        scoring=Scoring(dim**-0.5, window),
        fresh=fresh,
    )
    assert case.keys.equal(keys)
    assert case.values.equal(values)
    assert found.equal(wanted)


def test_heads_whose_squares_are_summed_in_another_order_are_rotated_before(device: torch.device) -> None:
    norm, half = torch.ones(96, device=device), torch.ones(1, 1, 16, device=device)
    assert not can_begin_fresh(96, Fresh(norm, norm, 1e-6, None, None))
    assert not can_begin_fresh(64, Fresh(norm[:64], norm[:64], 1e-6, half, half))
    assert can_begin_fresh(96, Fresh(None, None, 0.0, half, half))
