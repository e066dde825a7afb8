"""The likeliest token of each row, with its probability in levels: one kernel for what torch needs a dozen for."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import next_power_of_2, overlapping

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
