"""Paged attention for single query rows on the CPU: one compiled loop over (row, KV head), straight from the blocks.

Each item walks its sequence's blocks once with an online softmax, so that no score matrix is ever stored, and uses
every key and value it loads for all query heads that share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Sums may be reordered so that they vectorise; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Callable[..., None]) -> Any:
    """`function` as parallel machine code, kept on disk where a place to write is found."""
    options = {"parallel": True, "fastmath": _FAST, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # nowhere to keep it, as in a read-only container: compiled again at every start
        return numba.njit(function, **options)


@compiled
def attend_rows(
    q: np.ndarray,  # [T, heads, d] float32
    keys: np.ndarray,  # [num_blocks, block_size, kv_heads, d] float32
    values: np.ndarray,
    tables: np.ndarray,  # [S, longest] int32
    rows: np.ndarray,  # [R] which rows of q to compute
    sequences: np.ndarray,  # [R] whose table each row reads
    lengths: np.ndarray,  # [R] how many positions each row sees, itself included
    scale: np.float32,
    window: int,  # 0: none
    softcap: np.float32,  # 0: none
    out: np.ndarray,  # [T, heads, d] float32
) -> None:
    block_size, num_kv_heads, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    group = q.shape[1] // num_kv_heads
    for item in numba.prange(rows.shape[0] * num_kv_heads):
        row, kv_head = rows[item // num_kv_heads], item % num_kv_heads
        table, length = tables[sequences[item // num_kv_heads]], lengths[item // num_kv_heads]
        first = max(0, length - window) if window > 0 else 0
        highest = np.full(group, np.float32(-1e30), dtype=np.float32)
        total = np.zeros(group, dtype=np.float32)
        weighted = np.zeros((group, head_dim), dtype=np.float32)
        scores = np.empty(block_size, dtype=np.float32)
        for logical in range(first // block_size, (length + block_size - 1) // block_size):
            block = table[logical]
            begin = max(first - logical * block_size, 0)
            end = min(length - logical * block_size, block_size)
            for member in range(group):
                head = kv_head * group + member
                peak = highest[member]
                for slot in range(begin, end):
                    score = np.float32(0.0)
                    for i in range(head_dim):
                        score += q[row, head, i] * keys[block, slot, kv_head, i]
                    score *= scale
                    if softcap > 0:
                        score = softcap * np.tanh(score / softcap)
                    scores[slot] = score
                    peak = max(peak, score)
                shrink = np.exp(highest[member] - peak)
                highest[member] = peak
                total[member] *= shrink
                for i in range(head_dim):
                    weighted[member, i] *= shrink
                for slot in range(begin, end):
                    weight = np.exp(scores[slot] - peak)
                    total[member] += weight
                    for i in range(head_dim):
                        weighted[member, i] += weight * values[block, slot, kv_head, i]
        for member in range(group):
            inverse = np.float32(1.0) / total[member]
            for i in range(head_dim):
                out[row, kv_head * group + member, i] = weighted[member, i] * inverse
