"""Choosing the experts of every token, and sorting the pairs of a token and an expert by expert, on the device.

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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping, tuned

NEVER = tl.constexpr(-1.0e30)  # below every score
LEAST = tl.constexpr(-(2**63))  # below every score's bits


@triton.jit
def chosen_experts(
    logits,  # [BG, BE]: of one token
    bias_ptr,
    num_experts,
    scale,
    eps,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    BG: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    """The weights and the experts [BK] of a token whose logits are a tile [groups, experts of a group]. Of equal
    scores the first wins. Behind the TOP_K chosen ones are the shared experts, with weight 1."""
    size = num_experts // GROUPS
    group = tl.arange(0, BG)
    member = tl.arange(0, BE)
    expert = group[:, None] * size + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < size)[None, :]
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-tl.where(exists, logits, 0.0)))
    else:
        powers = tl.where(exists, tl.exp(logits - tl.max(logits)), 0.0)
        scores = powers / tl.sum(powers)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    choice = tl.where(exists, choice, NEVER)
    if TOP_GROUPS < GROUPS:
        rest = choice
        sums = tl.zeros([BG], tl.float32)
        for _ in range(GROUP_BEST):
            best = tl.max(rest, 1)
            sums += best
            at = tl.min(tl.where(rest == best[:, None], member[None, :], BE), 1)
            rest = tl.where(member[None, :] == at[:, None], NEVER, rest)
        sums = tl.where(group < GROUPS, sums, NEVER)
        kept = group < 0
        for _ in range(TOP_GROUPS):
            first = tl.min(tl.where(sums == tl.max(sums), group, BG))
            kept |= group == first
            sums = tl.where(group == first, NEVER, sums)
        choice = tl.where(kept[:, None], choice, NEVER)
    k = tl.arange(0, BK)
    chosen = tl.zeros([BK], tl.int32)
    weights = tl.zeros([BK], tl.float32)
    # One number to compare: a score's bits, in the order of the scores, before those of the expert.
    bits = choice.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (bits.to(tl.int64) << 32) | (num_experts - expert).to(tl.int64)
    keys = tl.where(exists, keys, LEAST)
    for i in range(TOP_K):
        best = tl.max(keys)
        first = num_experts - best.to(tl.int32)
        chosen = tl.where(k == i, first, chosen)
        if HAS_BIAS:
            score = tl.sum(tl.where((expert == first) & exists, scores, 0.0))
        else:  # scores are not below zero
            score = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        weights = tl.where(k == i, score, weights)
        keys = tl.where(expert == first, LEAST, keys)
    if NORMALIZE:
        weights = weights / (tl.sum(weights) + eps)
    is_shared = k >= TOP_K
    return tl.where(is_shared, 1.0, weights * scale), tl.where(is_shared, num_experts + k - TOP_K, chosen)


@triton.jit
def expert_tile(num_experts, GROUPS: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr):
    """The experts as a tile [groups, experts of a group], and which of its places have one."""
    size = num_experts // GROUPS
    group = tl.arange(0, BG)
    member = tl.arange(0, BE)
    return group[:, None] * size + member[None, :], (group < GROUPS)[:, None] & (member < size)[None, :]


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, experts]
    bias_ptr,  # [experts] float32, or anything without HAS_BIAS
    weights_ptr,  # [T, TOP_K + SHARED]
    experts_ptr,  # [T, TOP_K + SHARED] int32
    num_experts,
    scale,
    eps,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # further experts, which every token uses
    BG: tl.constexpr,  # GROUPS, as a power of two
    BE: tl.constexpr,  # experts of a group, as a power of two
    BK: tl.constexpr,  # TOP_K + SHARED, as a power of two
    OVERLAP: tl.constexpr,
):
    """One program per token."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert, exists = expert_tile(num_experts, GROUPS, BG, BE)
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=exists, other=NEVER).to(tl.float32)
    weights, chosen = chosen_experts(
        logits, bias_ptr, num_experts, scale, eps, SIGMOID, HAS_BIAS, NORMALIZE, GROUPS, TOP_GROUPS, GROUP_BEST, TOP_K,
        BG, BE, BK,
    )  # fmt: skip
    k = tl.arange(0, BK)
    count: tl.constexpr = TOP_K + SHARED
    tl.store(weights_ptr + token * count + k, weights.to(weights_ptr.dtype.element_ty), mask=k < count)
    tl.store(experts_ptr + token * count + k, chosen, mask=k < count)


class RouteRule(NamedTuple):
    """How experts are chosen and weighted, as `layers.routing.Routing` describes it."""

    top_k: int
    sigmoid: bool
    normalize: bool
    normalize_eps: float
    scale: float
    num_groups: int
    top_groups: int
    group_best: int
    num_shared: int = 0  # experts behind the others by number, which every token uses with weight 1

    @property
    def per_token(self) -> int:
        """The experts of a token."""
        return self.top_k + self.num_shared

    def constants(self, num_experts: int, has_bias: bool) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "SIGMOID": self.sigmoid,
            "HAS_BIAS": has_bias,
            "NORMALIZE": self.normalize,
            "GROUPS": self.num_groups,
            "TOP_GROUPS": self.top_groups,
            "GROUP_BEST": self.group_best,
            "TOP_K": self.top_k,
            "SHARED": self.num_shared,
            "BG": next_power_of_2(self.num_groups),
            "BE": next_power_of_2(num_experts // self.num_groups),
            "BK": next_power_of_2(self.per_token),
        }


def route(logits: Tensor, bias: Tensor | None, dtype: torch.dtype, rule: RouteRule) -> tuple[Tensor, Tensor]:
    """The weights, in `dtype`, and the indices (int32) of each token's experts, both [T, per_token]."""
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, rule.per_token, dtype=dtype, device=logits.device)
    experts = torch.empty(tokens, rule.per_token, dtype=torch.int32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        logits if bias is None else bias,
        weights,
        experts,
        num_experts,
        rule.scale,
        rule.normalize_eps,
        **rule.constants(num_experts, bias is not None),
        num_warps=1 if num_experts <= 256 else 4,
        **overlapping(logits.device),
    )
    return weights, experts


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
