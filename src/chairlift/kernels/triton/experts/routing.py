"""Choosing the experts of every token in one GPU kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import next_power_of_2, overlapping

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
