"""Sorting pairs of a token and one of its experts by expert, without synchronising with the host.

Each expert's pairs are split into tiles of rows, and one grid computes the tiles of all experts. Only the device knows
the number of tiles, so the grid has the size of the worst case; programs without a tile return at once.

    pairs        t0e2 t0e5 t1e2 t1e0          expert of each pair, as routed
    order        3 | 0 2 | 1                  the pairs of expert 0, of 2, of 5
    slots        e0 | _ | e2 | _ | _ | e5     expert e's tiles begin at slot start[e] // ROWS + e

Slots assigned this way never overlap, without counting other experts' tiles: c pairs need at most c // ROWS + 1 tiles,
and at least as many slots lie before the next expert's first.

One program per expert looks at all pairs. Many pairs are cut into segments, with a program for each expert and segment:
one kernel counts their pairs, and the second knows from all counts where its own begin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping, tuned

FEW_PAIRS = 8192  # One program per expert looks at no more: 6,144 take 9 us on an H200.
SHORTEST_SEGMENT, MOST_SEGMENTS = 4096, 32
PAIRS_AT_ONCE = 1024  # divides a segment
NO_EXPERT = tl.constexpr(-1)
BEYOND = tl.constexpr(2**30)  # above every expert id: no expert counts or takes it


@triton.jit
def _sort_kernel(
    experts_ptr,  # [pairs] int64 or int32: the expert of each pair
    positions_ptr,  # [tokens] int32, -1 for padding rows, whose pairs are left out
    order_ptr,  # [pairs] int32: the pairs, sorted by expert
    tile_expert_ptr,  # [slots] int32, NO_EXPERT for slots without a tile
    tile_begin_ptr,  # [slots] int32: first index in `order`
    tile_end_ptr,  # [slots] int32
    counts_ptr,  # [segments, experts] int32, with SEGMENT only
    num_pairs,
    num_routed,  # experts; those behind them are shared
    TOP_K: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,  # pairs of a program; 0: all
    SEGMENTS: tl.constexpr,  # padded
    EXPERTS: tl.constexpr,  # padded
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per expert (and segment) collects its pairs in order and splits them into tiles."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if SEGMENT == 0:
        smaller = tl.zeros([BLOCK], tl.int32)
        mine = tl.zeros([BLOCK], tl.int32)
        for at in range(0, num_pairs, BLOCK):
            expert = expert_of(at + lane, experts_ptr, positions_ptr, num_pairs, TOP_K, HAS_POSITIONS)
            smaller += (expert < me).to(tl.int32)
            mine += (expert == me).to(tl.int32)
        start = tl.sum(smaller, 0)
        end = start + tl.sum(mine, 0)
        found = start
        first_pair = 0
        last_pair = num_pairs
    else:
        e = tl.arange(0, EXPERTS)[None, :]
        s = tl.arange(0, SEGMENTS)[:, None]
        exists = (e < tl.num_programs(0)) & (s < tl.num_programs(1))
        counts = tl.load(counts_ptr + s * tl.num_programs(0) + e, mask=exists, other=0)
        start = tl.sum(tl.sum(tl.where(e < me, counts, 0), 1), 0)
        of_segments = tl.sum(tl.where(e == me, counts, 0), 1)
        end = start + tl.sum(of_segments, 0)
        found = start + tl.sum(tl.where(tl.arange(0, SEGMENTS) < tl.program_id(1), of_segments, 0), 0)
        first_pair = tl.program_id(1) * SEGMENT
        last_pair = tl.minimum(first_pair + SEGMENT, num_pairs)
    for at in range(first_pair, last_pair, BLOCK):
        expert = expert_of(at + lane, experts_ptr, positions_ptr, num_pairs, TOP_K, HAS_POSITIONS)
        is_mine = (expert == me).to(tl.int32)
        tl.store(order_ptr + found + tl.cumsum(is_mine, 0) - 1, at + lane, mask=is_mine == 1)
        found += tl.sum(is_mine, 0)
    if tl.program_id(1) > 0:
        return
    first_slot = start // ROWS + me
    rows = tl.where(me < num_routed, ROWS, SHARED_ROWS)
    # The last expert clears the slots that pairs of padding rows leave unused.
    is_last = me == tl.num_programs(0) - 1
    num_slots = tl.where(is_last, num_pairs, end) // ROWS + me + 1 - first_slot
    for at in range(0, num_slots, BLOCK):
        slot = at + lane
        begin = start + slot * rows
        inside = slot < num_slots
        tl.store(tile_expert_ptr + first_slot + slot, tl.where(begin < end, me, NO_EXPERT), mask=inside)
        tl.store(tile_begin_ptr + first_slot + slot, begin, mask=inside)
        tl.store(tile_end_ptr + first_slot + slot, tl.minimum(begin + rows, end), mask=inside)


@triton.jit
def _count_kernel(
    experts_ptr,
    positions_ptr,
    counts_ptr,  # [segments, experts] int32
    num_pairs,
    TOP_K: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Count the pairs of one expert in one segment."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    me = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    mine = tl.zeros([BLOCK], tl.int32)
    begin = tl.program_id(1) * SEGMENT
    for at in range(begin, tl.minimum(begin + SEGMENT, num_pairs), BLOCK):
        expert = expert_of(at + lane, experts_ptr, positions_ptr, num_pairs, TOP_K, HAS_POSITIONS)
        mine += (expert == me).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(1) * tl.num_programs(0) + me, tl.sum(mine, 0))


@triton.jit
def expert_of(pair, experts_ptr, positions_ptr, num_pairs, TOP_K: tl.constexpr, HAS_POSITIONS: tl.constexpr):
    """The expert of each pair, BEYOND for pairs of padding rows."""
    exists = pair < num_pairs
    expert = tl.load(experts_ptr + pair, mask=exists, other=BEYOND)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + pair // TOP_K, mask=exists, other=-1)
        expert = tl.where(position < 0, BEYOND, expert)
    return expert


class Grouping(NamedTuple):
    """Pairs sorted by expert and the tiles of each expert, int32 on the device."""

    order: Tensor  # [pairs]
    tile_expert: Tensor  # [slots]
    tile_begin: Tensor  # [slots]
    tile_end: Tensor  # [slots]


def group_by_expert(
    experts: Tensor,
    num_experts: int,
    rows: int,
    positions: Tensor | None = None,
    *,
    num_shared: int = 0,
    shared_rows: int = 0,
) -> Grouping:
    """Sort the T * k pairs of `experts` [T, k] by expert and split them into tiles of `rows`.

    Tokens with a position [T] below 0 are padding and in no tile; the rest of `order` is undefined.
    `num_shared`: experts behind the `num_experts` routed ones, with tiles of `shared_rows`, which are not fewer.
    """
    assert num_shared == 0 or shared_rows >= rows
    pairs, top_k = experts.numel(), experts.shape[1]
    count = num_experts + num_shared
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(3, pairs // rows + count, dtype=torch.int32, device=experts.device)
    experts, positions_or_any = experts.contiguous(), order if positions is None else positions
    segment = segment_of(pairs)
    segments = cdiv(pairs, segment) if segment else 1
    options = {"TOP_K": top_k, "HAS_POSITIONS": positions is not None, "SEGMENT": segment, "BLOCK": PAIRS_AT_ONCE}
    options |= {"num_warps": 4} | overlapping(experts.device)
    counts = order
    if segment:
        counts = torch.empty(segments, count, dtype=torch.int32, device=experts.device)
        _count_kernel[(count, segments)](experts, positions_or_any, counts, pairs, **options)
    _sort_kernel[(count, segments)](
        experts,
        positions_or_any,
        order,
        *tiles,
        counts,
        pairs,
        num_experts,
        ROWS=rows,
        SHARED_ROWS=shared_rows or rows,
        SEGMENTS=next_power_of_2(segments),
        EXPERTS=next_power_of_2(count),
        **options,
    )
    return Grouping(order, *tiles)


def segment_of(pairs: int) -> int:
    """Pairs of a segment; 0: one program per expert looks at all, as in kernels that serve every step."""
    if pairs <= FEW_PAIRS or not tuned():
        return 0
    return max(SHORTEST_SEGMENT, next_power_of_2(cdiv(pairs, MOST_SEGMENTS)))
