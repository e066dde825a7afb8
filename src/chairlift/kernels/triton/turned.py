"""Attention of single tokens over an 8-bit cache with the products turned: keys and values are the left operand.

The left operand of a tensor core's product has at least 16 rows, the right one at least 8 columns. The few queries that
share a key head are the right one, so that fewer rows are padding, and sums take half the registers. Scores are
[keys, M], sums [D / 2, M] for the even and the odd elements of a head each.

Products are in float16, since the chip converts e4m3 to float16 in one exact instruction:

- Each query head is divided by the power of two that leaves its largest element in [1, 2). Elements down to 2^-14 are
  then exact, smaller ones within 2^-25, far below the rounding of the large ones. A score is a sum in float32, at most
  2 * 448 * D.
- Softmax weights are at most 2^15 instead of 1, within float16's 65,504, so that those below 2^-40 of the largest
  become zero, not those below 2^-25, of which a long context has many. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.kernels.triton.attention import cap_scores
from chairlift.kernels.triton.widen import halves


@triton.jit
def load_turned_tile(keys_ptr, values_ptr, offset, word, inside, in_words):
    """Load keys [N, D / 2] and values [D / 2, N] as words of two 8-bit numbers."""
    k_at = (keys_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)
    v_at = (values_ptr + offset).to(tl.pointer_type(tl.int16), bitcast=True)
    k = tl.load(k_at[:, None] + word[None, :], mask=inside[:, None] & in_words[None, :], other=0)
    v = tl.load(v_at[None, :] + word[:, None], mask=inside[None, :] & in_words[:, None], other=0)
    return k, v


@triton.jit
def turned_queries(q, scale_log2):
    """The even and the odd elements [D / 2, M] of queries [M, D] in float16, and the factors [M] of their scores."""
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23  # its exponent
    largest = tl.minimum(tl.maximum(largest, 1), 253)  # The power of two and its inverse stay normal numbers.
    inverse = ((254 - largest) << 23).to(tl.float32, bitcast=True)
    q = (q * inverse[:, None]).to(tl.float16)
    even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    return tl.trans(even), tl.trans(odd), (largest << 23).to(tl.float32, bitcast=True) * scale_log2


@triton.jit
def take_in_turned(
    q, q_odd, k, v, inside, best, total, acc, acc_odd, factor, SOFTCAP: tl.constexpr, FAST: tl.constexpr
):
    """Update the running softmax with one tile; `best` is the largest score less 15, or a sink."""
    k, k_odd = halves(k, tl.float16, FAST)
    scores = tl.dot(k_odd, q_odd, tl.dot(k, q))
    scores = cap_scores(scores * factor[None, :], SOFTCAP)
    scores = tl.where(inside[:, None], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 0) - 15.0)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a first token has no cached keys: avoid NaN
    weights = tl.exp2(scores - safe[None, :])
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 0)
    weights = weights.to(tl.float16)
    v, v_odd = halves(v, tl.float16, FAST)
    acc = tl.dot(v, weights, acc * shrink[None, :])
    acc_odd = tl.dot(v_odd, weights, acc_odd * shrink[None, :])
    return new_best, total, acc, acc_odd


@triton.jit
def turned_back(acc, acc_odd):
    """Join sums of even and odd elements [D / 2, M] to [M, D]."""
    return tl.reshape(tl.trans(tl.join(acc, acc_odd), [1, 0, 2]), [acc.shape[1], 2 * acc.shape[0]])
