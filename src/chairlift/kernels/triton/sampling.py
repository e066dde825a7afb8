"""One token per row, chosen on the device: arg max, or a draw after temperature, top-k, top-p and min-p.

The draw equals that of the host's sampler: the cumulative weights in vocabulary order are inverted at one uniform
number. The filters are lower bounds of a token's weight, found by bisection instead of sorting: a few dozen passes over
a row that stays in the cache. Draft passes take the likeliest token, with its probability in levels, in one kernel for
which torch needs a dozen.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2, overlapping

BAD_LOGITS = -1


@triton.jit
def _weights(row_ptr, column, vocab, highest, inverse_temperature):
    logits = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp((logits - highest) * inverse_temperature)


@triton.jit
def _mass_above(row_ptr, vocab, highest, inverse_temperature, floor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum, or with COUNT the number, of the weights of at least `floor`."""
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocab, BLOCK):
        column = at + tl.arange(0, BLOCK)
        weight = _weights(row_ptr, column, vocab, highest, inverse_temperature)
        reaches = (weight >= floor) & (column < vocab)
        total += tl.where(reaches, 1.0 if COUNT else weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _floor_for(row_ptr, vocab, highest, inverse_temperature, goal, low, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest floor of at least `low` that keeps a mass of `goal`. Bisects the exponent, since weights span many
    magnitudes."""
    bottom = tl.maximum(tl.log2(tl.maximum(low, 1e-37)), -120.0)
    top = 0.0  # the largest weight is 1
    for _ in range(40):
        middle = (bottom + top) * 0.5
        mass = _mass_above(row_ptr, vocab, highest, inverse_temperature, tl.exp2(middle), COUNT, BLOCK)
        enough = mass >= goal
        bottom = tl.where(enough, middle, bottom)
        top = tl.where(enough, top, middle)
    return tl.exp2(bottom)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [rows, vocab]
    tokens_ptr,  # [rows] int32: the result
    last_token_ptr,  # [slots] int32: the result, where the next step finds it
    slots_ptr,  # [rows] int32, -1 for rows without a request
    temperature_ptr,  # [rows] float32, 0 for the arg max
    top_k_ptr,  # [rows] int32, 0 for all
    top_p_ptr,  # [rows] float32
    min_p_ptr,  # [rows] float32
    uniform_ptr,  # [rows] float32
    best_ptr,  # [rows, SPLITS] float32: each part's highest logit, NaN if it holds one
    best_token_ptr,  # [rows, SPLITS] int32
    arrived_ptr,  # [rows] int32, all zero between steps
    vocab,
    logits_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    lane = tl.arange(0, BLOCK)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    span = tl.cdiv(vocab, SPLITS * BLOCK) * BLOCK
    end = tl.minimum((split + 1) * span, vocab)
    for at in range(split * span, end, BLOCK):
        column = at + lane
        logits = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
        broken |= (logits != logits).to(tl.int32)
        better = logits > high
        high = tl.where(better, logits, high)
        where = tl.where(better, column, where)
    highest = tl.max(high, 0)
    token = tl.min(tl.where(high == highest, where, vocab), 0)  # the lowest id where several tie
    highest = tl.where(tl.max(broken, 0) > 0, float("nan"), highest)
    # The last part of a row to finish samples from all of them.
    tl.store(best_ptr + row * SPLITS + split, highest)
    tl.store(best_token_ptr + row * SPLITS + split, token)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
        return
    tl.debug_barrier()
    tl.store(arrived_ptr + row, 0)
    parts = row * SPLITS + tl.arange(0, SPLITS)
    bests = tl.load(best_ptr + parts, volatile=True)
    candidates = tl.load(best_token_ptr + parts, volatile=True)
    any_broken = tl.max((bests != bests).to(tl.int32), 0)
    highest = tl.max(bests, 0)
    token = tl.min(tl.where(bests == highest, candidates, vocab), 0)
    temperature = tl.load(temperature_ptr + row)
    if (any_broken > 0) | (highest == float("inf")) | (highest == float("-inf")):
        token = -1
    elif temperature > 0.0:
        inverse = 1.0 / temperature
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        floor = 0.0
        if top_k > 0:
            floor = _floor_for(row_ptr, vocab, highest, inverse, top_k.to(tl.float32), floor, True, BLOCK)
        if top_p < 1.0:
            mass = _mass_above(row_ptr, vocab, highest, inverse, floor, False, BLOCK)
            floor = _floor_for(row_ptr, vocab, highest, inverse, top_p * mass, floor, False, BLOCK)
        floor = tl.maximum(floor, tl.load(min_p_ptr + row))
        total = _mass_above(row_ptr, vocab, highest, inverse, floor, False, BLOCK)
        target = tl.load(uniform_ptr + row) * total
        before = 0.0
        found = vocab
        heaviest_last = 0
        for at in range(0, vocab, BLOCK):
            if found == vocab:
                column = at + lane
                weight = _weights(row_ptr, column, vocab, highest, inverse)
                weight = tl.where((weight >= floor) & (column < vocab), weight, 0.0)
                cumulative = before + tl.cumsum(weight, 0)
                passed = (cumulative > target) & (weight > 0.0)
                found = tl.min(tl.where(passed, column, vocab), 0)
                heaviest_last = tl.maximum(heaviest_last, tl.max(tl.where(weight > 0.0, column, 0), 0))
                before += tl.sum(weight, 0)
        # Rounding may put the target just above the last sum: then take the last token with any weight.
        token = tl.where(found == vocab, heaviest_last, found)
    tl.store(tokens_ptr + row, token)
    tl.store(last_token_ptr + slot, token)


@cache
def _scratch(rows: int, splits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Scratch memory shared by all steps of one stream, which run in sequence."""
    best = torch.empty(rows, splits, device=device)
    return best, torch.empty_like(best, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32, device=device)


def sample(
    logits: Tensor,
    *,
    tokens: Tensor,
    last_token: Tensor,
    slots: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> None:
    """Sample one token per row of logits [rows, vocab] into `tokens` [rows] and `last_token[slots]`.

    Rows with slot -1 are skipped; a row with NaN or infinite logits gets BAD_LOGITS.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    block = min(next_power_of_2(vocab), 4096)
    splits = min(16, next_power_of_2(cdiv(vocab, block)))
    best, best_token, arrived = _scratch(rows, splits, logits.device)
    _sample_kernel[(rows, splits)](
        logits,
        tokens,
        last_token,
        slots,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        best,
        best_token,
        arrived,
        vocab,
        logits.stride(0),
        SPLITS=splits,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
        **overlapping(logits.device),
    )


MAX_BLOCK = 8192  # scores of a row that a program reads at once


@triton.jit
def likeliest_kernel(
    scores_ptr,  # [rows, vocab]
    ids_ptr,  # [vocab] int64: the token of each column, if HAS_IDS
    tokens_ptr,  # [rows] int32: the result
    levels_ptr,  # [rows] int32: the result
    vocab,
    stride,
    HAS_IDS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    row_ptr = scores_ptr + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for at in range(0, vocab, BLOCK):
        column = at + lane
        score = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        better = score > high
        high = tl.where(better, score, high)
        where = tl.where(better, column, where)
    highest = tl.max(high, 0)
    best = tl.min(tl.where(high == highest, where, vocab - 1), 0)  # the lowest one where several tie
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # no score is a number
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocab, BLOCK):
        column = at + lane
        score = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        total += tl.exp(score - highest)
    chance = 1.0 / tl.sum(total, 0)
    chance = tl.where(chance <= 1.0, chance, 0.0)  # NaN scores give any token, with no confidence.
    level = tl.minimum((chance * LEVELS).to(tl.int32), LEVELS - 1)
    token = best
    if HAS_IDS:
        token = tl.load(ids_ptr + best).to(tl.int32)
    tl.store(tokens_ptr + row, token)
    tl.store(levels_ptr + row, level)


def likeliest(scores: Tensor, ids: Tensor | None, tokens: Tensor, levels: Tensor, num_levels: int) -> None:
    """scores [R, vocab] -> the likeliest tokens [R] int32, and their probabilities as levels [R] int32.

    ids [vocab] int64: the token of each column; None if it is the column itself."""
    vocab = scores.shape[1]
    likeliest_kernel[(len(scores),)](
        scores,
        scores if ids is None else ids,
        tokens,
        levels,
        vocab,
        scores.stride(0),
        HAS_IDS=ids is not None,
        LEVELS=num_levels,
        BLOCK=min(MAX_BLOCK, next_power_of_2(vocab)),
        num_warps=8,
        **overlapping(scores.device),
    )
