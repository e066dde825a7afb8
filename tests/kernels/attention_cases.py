"""Random ragged attention batches in a paged cache, run by the Triton kernels, and their reference in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chairlift.kernels.triton.attention import Chunks, Scoring, prefill_attention, queries_per_tile
from chairlift.kernels.triton.decode import DecodeTiling, Fresh, Scratch, decode_attention
from chairlift.kernels.triton.hopper_prefill import hopper_prefill_attention
from chairlift.kernels.triton.layers import rotate_and_store_

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class AttentionCase:
    """Sequences with `starts` tokens in the cache and `counts` new ones, in a paged cache with shuffled blocks."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    slots: list[int]
    starts: list[int]
    counts: list[int]
    chunk: int | None = None
    sinks: Tensor | None = None

    @property
    def rows(self) -> list[int]:
        return [sum(self.counts[:i]) for i in range(len(self.counts))]


def make_case(
    starts: list[int],
    counts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    seed: int = 0,
) -> AttentionCase:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    per_sequence = [-(-(start + count) // block_size) for start, count in zip(starts, counts, strict=True)]
    num_blocks = sum(per_sequence) + 3
    free = list(range(num_blocks))
    rng.shuffle(free)
    slots = rng.sample(range(len(starts) + 2), len(starts))
    tables = torch.zeros(len(starts) + 2, max(per_sequence, default=1) + 1, dtype=torch.int32)
    for slot, blocks in zip(slots, per_sequence, strict=True):
        for i in range(blocks):
            tables[slot, i] = free.pop()
    cache = (num_blocks, block_size, kv_heads, dim)
    q = torch.randn(sum(counts), heads, dim, device=device).to(dtype)
    keys, values = (torch.randn(cache, device=device).to(dtype) for _ in range(2))
    return AttentionCase(q, keys, values, tables.to(device), slots, starts, counts)


def reference(case: AttentionCase, scale: float, window: int | None, softcap: float | None) -> Tensor:
    out = torch.zeros_like(case.q, dtype=torch.float64)
    group = case.q.shape[1] // case.keys.shape[2]
    block_size = case.keys.shape[1]
    for slot, start, count, row in zip(case.slots, case.starts, case.counts, case.rows, strict=True):
        length = start + count
        table = case.tables[slot, : -(-length // block_size)].long()
        k, v = (
            side[table].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            for side in (case.keys, case.values)
        )
        scores = torch.einsum("qhd,khd->hqk", case.q[row : row + count].double(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(start, length, device=k.device)[:, None]
        key = torch.arange(length, device=k.device)[None, :]
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        if case.chunk is not None:
            visible &= key // case.chunk == query // case.chunk
        weights = scores.masked_fill(~visible, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        weights /= total if case.sinks is None else total + case.sinks.double().exp()[:, None, None]
        out[row : row + count] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def as_ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def run_decode(
    case: AttentionCase,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None = None,
    padding_rows: int = 0,
    out: Tensor | None = None,
    fresh: Fresh | None = None,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """Run the decode kernel twice, with every unwritten result set to NaN before."""
    device = case.q.device
    rows = len(case.slots) + padding_rows
    out = torch.full_like(case.q, float("nan")) if out is None else out
    _, heads, dim = out.shape
    scratch = Scratch(heads, case.keys.shape[2], dim, device)
    scratch.partial.fill_(float("nan"))
    if splits is not None:
        scratch.partial = torch.full((rows * splits, heads, dim), float("nan"), device=device)
        scratch.lse = torch.full((rows * splits, heads), float("nan"), device=device)
    for _ in range(2):  # the second run meets the scratch memory of the first
        decode_attention(
            case.q,
            case.keys,
            case.values,
            out,
            tables=case.tables,
            row_slot=as_ints(case.slots + [0] * padding_rows, device),
            row_start=as_ints(case.starts + [0] * padding_rows, device),
            row_count=as_ints(case.counts + [0] * padding_rows, device),
            scratch=scratch,
            scoring=Scoring(scale, window, softcap, case.chunk, case.sinks),
            splits=splits,
            fresh=fresh,
            tiling=tiling,
        )
    assert not scratch.arrived.any()
    return out


def check_fused_decode(
    heads: int,
    kv_heads: int,
    dim: int,
    pairs: int,
    splits: int,
    window: int | None,
    tiling: DecodeTiling,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    tolerance: float = 1e-5,
    new_heads: int = 2,
    v_norm: bool = False,
) -> None:
    """A decode from the projection equals a separate kernel for norms, rotation and the write to the cache."""
    starts = [0, 15, 16, 70, 3]
    rows = len(starts)
    case = make_case(starts, [1] * rows, heads=heads, kv_heads=kv_heads, dim=dim, device=device)
    case.keys, case.values = (each.to(cache or dtype) for each in (case.keys, case.values))
    keys, values = case.keys.clone(), case.values.clone()
    qkv = torch.randn(rows, (heads + new_heads * kv_heads) * dim, device=device).to(dtype)
    before, scale = qkv.clone(), dim**-0.5
    norms = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
    angles = torch.randn(rows, pairs, device=device)
    cos, sin = (angles.cos().to(dtype), angles.sin().to(dtype)) if pairs else (None, None)
    fresh = Fresh(norms[0], norms[1], 1e-6, cos, sin, v_norm)
    rotate_and_store_(
        qkv,
        case.keys,
        case.values,
        fresh,
        num_heads=heads,
        slots=as_ints(case.slots, device),
        positions=as_ints(starts, device),
        tables=case.tables,
    )
    case.q = qkv.view(rows, -1, dim)[:, :heads]
    case.sinks = torch.randn(heads, device=device) if window else None
    whole = replace(case, q=before.view(rows, -1, dim), keys=keys, values=values)
    out = torch.full((rows, heads, dim), float("nan"), device=device)
    run_decode(whole, scale, window, None, splits, out=out, fresh=fresh, tiling=tiling)
    near = 1e-5 if cache is None else 0.125  # a number between two of 8 bits may become either
    for mine, theirs in ((keys, case.keys), (values, case.values)):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=near, atol=min(near, 2**-9))
    case.keys, case.values = keys, values
    assert error(out, reference(case, scale, window, None)) < tolerance


def tiles_of(case: AttentionCase, queries: int) -> tuple[Tensor, Tensor]:
    """Chunk and first query of each tile, with one empty tile at the end."""
    tiles = [(i, at) for i, count in enumerate(case.counts) for at in range(0, count, queries)] + [(-1, 0)]
    device = case.q.device
    return as_ints([chunk for chunk, _ in tiles], device), as_ints([at for _, at in tiles], device)


def run_prefill(
    case: AttentionCase, scale: float, window: int | None, softcap: float | None, *, deep: bool = False
) -> Tensor:
    out, scoring = _unwritten(case), Scoring(scale, window, softcap, case.chunk, case.sinks)
    prefill_attention(case.q, case.keys, case.values, out, chunks_of(case), scoring, deep=deep)
    return out


def run_hopper_prefill(case: AttentionCase, scale: float) -> Tensor:
    out, scoring = _unwritten(case), Scoring(scale, sinks=case.sinks)
    hopper_prefill_attention(case.q, case.keys, case.values, out, chunks_of(case), scoring)
    return out


def _unwritten(case: AttentionCase) -> Tensor:
    return torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=case.q.device)


def chunks_of(case: AttentionCase, queries: int | None = None) -> Chunks:
    """Which queries see which keys, in tiles of `queries` tokens."""
    device = case.q.device
    _, heads, dim = case.q.shape
    queries = queries or queries_per_tile(heads, case.keys.shape[2], dim, case.q.dtype)
    rows = (as_ints(numbers, device) for numbers in (case.slots, case.rows, case.starts, case.counts))
    return Chunks(case.tables, *tiles_of(case, queries), *rows, queries)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error of the worst row (and head): one norm over the batch would hide rows that are zero."""
    difference, size = (found.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    relative = torch.where(difference == 0, 0.0, difference / size)
    return float(relative.nan_to_num(nan=float("inf")).max())
