"""The router's product, the choice of experts and the grouping of pairs in one kernel, for few tokens.

Several programs share the sum of the product. The last one to finish adds the parts, chooses the experts of each
token, and sorts the pairs by comparing each with all others. As no token has an expert twice, an expert has one tile;
tiles have the first slots, so that the grid of the products is as large as the number of pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.experts.routing import (
    BEYOND,
    NEVER,
    NO_EXPERT,
    Grouping,
    RouteRule,
    chosen_experts,
    expert_of,
    expert_tile,
)
from chairlift.kernels.triton.launch import (
    cdiv,
    last_power_of_2,
    next_power_of_2,
    overlapping,
    parts_of_rows,
    prefetch_rows,
    split_scratch,
)

MOST_TOKENS = 8  # one program chooses for one token after the other
# The experts of all tokens are chosen in sequence. On an H200 that takes 4.4 µs for one token of gpt-oss and 11.4 for
# eight, with eight experts per token 5.4 and 23.7; without this kernel, routing and sorting take 8 to 10 µs.
MOST_PAIRS = 32  # Shared experts, which are not chosen, do not count.
ROWS = 16  # A tile of the router's product has this many, the fewest that tensor cores multiply.
BLOCK = 16  # experts of a program
PROGRAMS = 128  # about one per multiprocessor of a Hopper GPU
SHORTEST_SPLIT = 256  # columns that a program reads at least


@triton.jit
def _route_and_group_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [experts, K]
    product_bias_ptr,  # [experts], with HAS_PRODUCT_BIAS only
    bias_ptr,  # [experts] float32: added for the choice, with HAS_BIAS only
    positions_ptr,  # [tokens] int32, below 0 for padding rows, whose pairs are in no tile
    squares_ptr,  # [tokens, SQUARES] float32: partial sums of squares of x's rows
    norm_ptr,  # [K]: the weight of the norm, with SQUARES only
    normed_ptr,  # [tokens, K]: where the normed rows are written, with SQUARES only
    parts_ptr,  # [SPLITS, tokens, experts] float32
    arrived_ptr,  # [1] int32, zero between launches
    weights_ptr,  # [tokens, TOP_K + SHARED]
    experts_ptr,  # [tokens, TOP_K + SHARED] int32
    order_ptr,  # [pairs] int32
    tile_expert_ptr,  # [pairs] int32
    tile_begin_ptr,  # [pairs] int32
    tile_end_ptr,  # [pairs] int32
    num_tokens,
    num_experts,
    K,
    scale,
    eps,
    norm_eps,
    HAS_PRODUCT_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BG: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,  # columns of x at once
    SQUARES: tl.constexpr,  # 0: x is not normalised
    SQUARES_PADDED: tl.constexpr,
    PREFETCH: tl.constexpr,  # rows of the weight are whole runs of 16 bytes
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    kind = weight_ptr.dtype.element_ty
    per_split = tl.cdiv(K, SPLITS * BD) * BD
    end = tl.minimum((split + 1) * per_split, K)
    if OVERLAP:
        if PREFETCH:  # the weight never changes
            size = tl.maximum(end - split * per_split, 0) * (kind.primitive_bitwidth // 8)
            prefetch_rows(weight_ptr + tl.minimum(n, num_experts - 1) * K + split * per_split, size)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SQUARES > 0:
        squares = parts_of_rows(squares_ptr, m, num_tokens, SQUARES, SQUARES_PADDED)
        factor = tl.rsqrt(tl.sum(squares, 1) / K + norm_eps)
    acc = tl.zeros([BM, BN], tl.float32)
    for at in range(split * per_split, end, BD):
        within = (at + d < end)[None, :]
        w = tl.load(weight_ptr + n[:, None] * K + at + d[None, :], mask=(n < num_experts)[:, None] & within, other=0.0)
        x = tl.load(x_ptr + m[:, None] * K + at + d[None, :], mask=(m < num_tokens)[:, None] & within, other=0.0)
        if SQUARES > 0:
            norm = tl.load(norm_ptr + at + d, mask=at + d < end, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * factor[:, None] * norm[None, :]).to(x_ptr.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(normed_ptr + m[:, None] * K + at + d[None, :], x, mask=(m < num_tokens)[:, None] & within)
        acc = tl.dot(x.to(kind), tl.trans(w), acc, input_precision=PRECISION)
    out_at = parts_ptr + (split * num_tokens + m)[:, None] * num_experts + n[None, :]
    tl.store(out_at, acc, mask=(m < num_tokens)[:, None] & (n < num_experts)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") != tl.num_programs(0) * SPLITS - 1:
        return
    tl.debug_barrier()
    tl.store(arrived_ptr, 0)

    expert, exists = expert_tile(num_experts, GROUPS, BG, BE)
    k = tl.arange(0, BK)
    per_token: tl.constexpr = TOP_K + SHARED
    for token in range(num_tokens):
        logits = tl.zeros([BG, BE], tl.float32)
        for other in tl.static_range(SPLITS):  # read from L2, where other multiprocessors wrote them
            part_at = parts_ptr + (other * num_tokens + token) * num_experts + expert
            logits += tl.load(part_at, mask=exists, other=0.0, cache_modifier=".cg")
        if HAS_PRODUCT_BIAS:
            logits += tl.load(product_bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
        logits = tl.where(exists, logits.to(kind).to(tl.float32), NEVER)
        weights, chosen = chosen_experts(
            logits, bias_ptr, num_experts, scale, eps, SIGMOID, HAS_BIAS, NORMALIZE, GROUPS, TOP_GROUPS, GROUP_BEST,
            TOP_K, BG, BE, BK,
        )  # fmt: skip
        tl.store(weights_ptr + token * per_token + k, weights.to(weights_ptr.dtype.element_ty), mask=k < per_token)
        tl.store(experts_ptr + token * per_token + k, chosen, mask=k < per_token)

    tl.debug_barrier()  # other threads of this program wrote the experts
    pair = tl.arange(0, PAIRS)
    num_pairs = num_tokens * per_token
    mine = expert_of(pair, experts_ptr, positions_ptr, num_pairs, per_token, True)
    theirs = mine[None, :]
    smaller = (theirs < mine[:, None]).to(tl.int32)
    same = (theirs == mine[:, None]).to(tl.int32)
    begin = tl.sum(smaller, 1)
    rank = tl.sum(tl.where(pair[None, :] < pair[:, None], same, 0), 1)
    in_tile = mine < BEYOND
    is_first = in_tile & (rank == 0)
    slot = tl.sum(tl.where(is_first[None, :], smaller, 0), 1)
    tl.store(order_ptr + begin + rank, pair, mask=in_tile)
    tl.store(tile_expert_ptr + slot, mine, mask=is_first)
    tl.store(tile_begin_ptr + slot, begin, mask=is_first)
    tl.store(tile_end_ptr + slot, begin + tl.sum(same, 1), mask=is_first)
    tl.store(tile_expert_ptr + pair, NO_EXPERT, mask=(pair >= tl.sum(is_first.to(tl.int32))) & (pair < num_pairs))


def can_route_few(tokens: int, top_k: int) -> bool:
    return 0 < tokens <= MOST_TOKENS and tokens * top_k <= MOST_PAIRS


class RowNorm(NamedTuple):
    """The norm of rows whose partial sums of squares are known."""

    squares: Tensor  # [T, parts] float32
    weight: Tensor  # [K]
    eps: float


def route_and_group(
    x: Tensor,
    weight: Tensor,
    product_bias: Tensor | None,
    bias: Tensor | None,
    rule: RouteRule,
    positions: Tensor,
    norm: RowNorm | None = None,
) -> tuple[Tensor, Grouping, Tensor]:
    """The weights [T, per_token], in the type of x [T, K], of each token's experts, the tiles of all experts, and the
    rows that the experts read: x, normed if there is a norm.

    `weight` [experts, K] and `product_bias` [experts] of the router; `bias` [experts] is added for the choice.
    Tokens with a position [T] below 0 are padding and in no tile.
    """
    (tokens, depth), num_experts, device = x.shape, len(weight), x.device
    assert can_route_few(tokens, rule.top_k)
    blocks = cdiv(num_experts, BLOCK)
    splits = last_power_of_2(min(PROGRAMS // blocks, depth // SHORTEST_SPLIT))
    pairs = tokens * rule.per_token
    parts, arrived = split_scratch(splits * MOST_TOKENS * num_experts, 1, device)
    weights = torch.empty(tokens, rule.per_token, dtype=x.dtype, device=device)
    experts, order, *tiles = torch.empty(5, pairs, dtype=torch.int32, device=device)
    x = x.contiguous()
    rows = x if norm is None else torch.empty_like(x)
    num_squares = 0 if norm is None else norm.squares.shape[1]
    _route_and_group_kernel[(blocks, splits)](
        x,
        weight,
        weight if product_bias is None else product_bias,
        parts if bias is None else bias,
        positions,
        parts if norm is None else norm.squares,
        weight if norm is None else norm.weight,
        rows,
        parts,
        arrived,
        weights,
        experts,
        order,
        *tiles,
        tokens,
        num_experts,
        depth,
        rule.scale,
        rule.normalize_eps,
        0.0 if norm is None else norm.eps,
        HAS_PRODUCT_BIAS=product_bias is not None,
        **rule.constants(num_experts, bias is not None),
        SPLITS=splits,
        PAIRS=max(16, next_power_of_2(pairs)),
        BM=ROWS,
        BN=BLOCK,
        BD=64 if weight.dtype == torch.float32 else 128,
        SQUARES=num_squares,
        SQUARES_PADDED=next_power_of_2(max(1, num_squares)),
        PREFETCH=depth * weight.element_size() % 16 == 0,
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
        **overlapping(device),
    )
    return weights, Grouping(order, *tiles), rows
