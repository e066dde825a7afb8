"""The kernel of paged attention of single new tokens: one program per (request, key head, split of the context).

Keys and values are read in place through the block tables. The last split of a context to finish merges the parts. In a
step of single tokens only, the same kernel also normalises and rotates the new token's queries and key, and writes its
key and value to the cache: only the program that holds the end of the context needs them.

Everything that changes from step to step is read from device memory, so a captured graph can be replayed for any
batch that fits its grid: programs without work return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chairlift.kernels.triton.attention import cap_scores, first_visible, load_tile, places, sinks_of
from chairlift.kernels.triton.launch import pairwise_sum, prefetch_rows
from chairlift.kernels.triton.turned import load_turned_tile, take_in_turned, turned_back, turned_queries
from chairlift.kernels.triton.widen import halves


@triton.jit
def partner_of(d, PAIRS: tl.constexpr):
    """The element that each one is rotated with."""
    return tl.where(d < PAIRS, d + PAIRS, tl.where(d < 2 * PAIRS, d - PAIRS, d))


@triton.jit
def load_heads(rows, d, keep, PAIRS: tl.constexpr):
    """Load heads (pointers [R, 1]) in float32, and the partner of each element."""
    x = tl.load(rows + d[None, :], mask=keep, other=0.0).to(tl.float32)
    y = x
    if PAIRS > 0:
        y = tl.load(rows + partner_of(d, PAIRS)[None, :], mask=keep, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def load_norm(norm_ptr, d, D: tl.constexpr, PAIRS: tl.constexpr, HAS_NORM: tl.constexpr):
    """The weights [D] of a norm for each element and for its partner."""
    weight, of_partner = d, d  # not used
    if HAS_NORM:
        weight = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        if PAIRS > 0:
            of_partner = tl.load(norm_ptr + partner_of(d, PAIRS), mask=d < D, other=0.0).to(tl.float32)
    return weight, of_partner


@triton.jit
def load_rotation(cos_ptr, sin_ptr, token, d, PAIRS: tl.constexpr):
    """The cosine and signed sine [D] of a token's rotation for each element."""
    cos, sin = d, d  # not used
    if PAIRS > 0:
        turns = d < 2 * PAIRS
        at = token * PAIRS + tl.where(d < PAIRS, d, d - PAIRS)
        cos = tl.load(cos_ptr + at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=turns, other=0.0).to(tl.float32)
        sin = tl.where(d < PAIRS, -sin, sin)
    return cos, sin


@triton.jit
def norm_and_rotate(
    x, y, weight, of_partner, cos, sin, eps, kind: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate heads of the type `kind`, with the roundings of `rotate_and_store_`."""
    if HAS_NORM:
        scale = tl.rsqrt(pairwise_sum(x * x) / D + eps)[:, None]
        x = (x * (scale * weight[None, :])).to(kind).to(tl.float32)
        if PAIRS > 0:
            y = (y * (scale * of_partner[None, :])).to(kind).to(tl.float32)
    if PAIRS > 0:
        x = x * cos[None, :] + y * sin[None, :]
    return x


@triton.jit
def rotated(
    rows,  # [R, 1] pointers to heads
    norm_ptr,
    cos_ptr,
    sin_ptr,
    token,
    d,
    keep,
    eps,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Load heads of a token, normalised and rotated, in float32; each element is loaded with its rotation partner."""
    x, y = load_heads(rows, d, keep, PAIRS)
    weight, of_partner = load_norm(norm_ptr, d, D, PAIRS, HAS_NORM)
    cos, sin = load_rotation(cos_ptr, sin_ptr, token, d, PAIRS)
    return norm_and_rotate(x, y, weight, of_partner, cos, sin, eps, rows.dtype.element_ty, D, PAIRS, HAS_NORM)


@triton.jit
def new_value(row, d, one, eps, D: tl.constexpr, V_NORM: tl.constexpr):
    """Load the value of a token (a pointer [1, 1]), normalised if V_NORM."""
    v = tl.load(row + d[None, :], mask=one, other=0.0).to(tl.float32)
    if V_NORM:
        v = (v * tl.rsqrt(pairwise_sum(v * v) / D + eps)[:, None]).to(row.dtype.element_ty).to(tl.float32)
    return v


@triton.jit
def _load_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head, PAIRED: tl.constexpr, TURNED: tl.constexpr):
    """Load a tile of keys and values in the form that `_take_in` expects."""
    if TURNED:
        k, v = load_turned_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head)
    else:
        k, v = load_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head, PAIRED)
    return k, v


@triton.jit
def _take_in_rows(
    q,
    q_odd,
    k,
    v,
    inside,
    best,
    total,
    acc,
    acc_odd,
    scale_log2,
    PAIRED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Update the running softmax with one tile of keys and values; PAIRED: even and odd columns by themselves."""
    if PAIRED:
        k, k_odd = halves(k, q.dtype, FAST)
        v, v_odd = halves(v, q.dtype, FAST)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = cap_scores(tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION) * scale_log2, SOFTCAP)
    else:
        scores = cap_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2, SOFTCAP)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a first token has no cached keys: avoid NaN
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(q.dtype)
    acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision=PRECISION)
    if PAIRED:
        acc_odd = acc_odd * shrink[:, None] + tl.dot(weights, v_odd, input_precision=PRECISION)
    return new_best, total, acc, acc_odd


@triton.jit
def _take_in(
    q, q_odd, k, v, inside, best, total, acc, acc_odd, factor,
    PAIRED: tl.constexpr, TURNED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Update the running softmax with one tile of keys and values, in either form."""
    if TURNED:
        best, total, acc, acc_odd = take_in_turned(
            q, q_odd, k, v, inside, best, total, acc, acc_odd, factor, SOFTCAP, FAST
        )
    else:
        best, total, acc, acc_odd = _take_in_rows(
            q, q_odd, k, v, inside, best, total, acc, acc_odd, factor, PAIRED, SOFTCAP, PRECISION, FAST
        )
    return best, total, acc, acc_odd


@triton.jit
def _take_in_all(
    q,
    q_odd,
    keys_ptr,
    values_ptr,
    table,
    begin,
    end,
    n,
    kv_block_stride,
    kv_token_stride,
    head_offset,
    in_head,
    best,
    total,
    acc,
    acc_odd,
    factor,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    AHEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    TURNED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Update the running softmax with all tiles from `begin` to `end`."""
    if AHEAD:
        inside = begin + n < end
        offset = places(table, begin + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        for at in range(begin, end, N):
            k, v = _load_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head, PAIRED, TURNED)
            then_inside = at + N + n < end
            offset = places(table, at + N + n, then_inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
            best, total, acc, acc_odd = _take_in(
                q, q_odd, k, v, inside, best, total, acc, acc_odd, factor, PAIRED, TURNED, SOFTCAP, PRECISION, FAST
            )
            inside = then_inside
    else:
        for at in range(begin, end, N):
            inside = at + n < end
            offset = places(table, at + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
            k, v = _load_tile(keys_ptr, values_ptr, offset, head_offset, inside, in_head, PAIRED, TURNED)
            best, total, acc, acc_odd = _take_in(
                q, q_odd, k, v, inside, best, total, acc, acc_odd, factor, PAIRED, TURNED, SOFTCAP, PRECISION, FAST
            )
    return best, total, acc, acc_odd


@triton.jit
def _take_in_new(
    q,
    new_k,
    new_v,
    key_at,
    value_at,
    one,
    best,
    total,
    acc,
    scale_log2,
    KV_LIMIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Store the new token's key and value, and attend to them as stored."""
    new_k = new_k.to(q.dtype).to(tl.float32)
    if KV_LIMIT > 0:  # keep NaN: clamping would turn it into a number
        new_k = tl.clamp(new_k, -KV_LIMIT, KV_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        new_v = tl.clamp(new_v, -KV_LIMIT, KV_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    kept_k, kept_v = new_k.to(key_at.dtype.element_ty), new_v.to(value_at.dtype.element_ty)
    tl.store(key_at, kept_k, mask=one)
    tl.store(value_at, kept_v, mask=one)
    score = cap_scores(tl.sum(q.to(tl.float32) * kept_k.to(tl.float32), 1) * scale_log2, SOFTCAP)
    new_best = tl.maximum(best, score)
    weight = tl.exp2(score - new_best)
    shrink = tl.exp2(best - new_best)
    total = total * shrink + weight
    acc = acc * shrink[:, None] + weight[:, None] * kept_v.to(tl.float32)
    return new_best, total, acc


@triton.jit
def _joined_splits(
    partial_ptr,
    lse_ptr,
    place,
    num_splits,
    m,
    d,
    in_group,
    keep,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
):
    """Merge the partial results of a context's splits, read from L2 where other multiprocessors wrote them."""
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PADDED], tl.float32)
    for other in tl.range(num_splits, loop_unroll_factor=4):  # keeps several loads in flight
        at = (place + other) * GROUP + m
        lse = tl.load(lse_ptr + at, mask=in_group, other=0.0, cache_modifier=".cg")
        part = tl.load(partial_ptr + at[:, None] * D + d[None, :], mask=keep, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, lse)
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(lse - new_best)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        best = new_best
    return acc / total[:, None]


@triton.jit
def decode_kernel(
    q_ptr,  # [rows, heads, D]; FRESH: [rows, heads + NEW * kv_heads, D], as the projection made them
    keys_ptr,  # [blocks, block_size, kv_heads, D]
    values_ptr,
    out_ptr,  # [rows, heads, D]
    partial_ptr,  # [rows, kv_heads, splits, GROUP, D] float32
    lse_ptr,  # [rows, kv_heads, splits, GROUP] float32, in log 2
    arrived_ptr,  # [rows, kv_heads] int32, all zero between steps
    tables_ptr,  # [slots, table_stride] int32
    row_slot_ptr,  # [rows] int32: row of the block tables
    row_start_ptr,  # [rows] int32: position of the row's token
    row_count_ptr,  # [rows] int32: 1, or 0 for a padding row
    q_norm_ptr,  # [D]; this and the next four with FRESH only
    k_norm_ptr,
    cos_ptr,  # [rows, PAIRS]
    sin_ptr,
    sinks_ptr,  # [heads] float32, with SINKS only
    eps,
    q_stride,
    out_stride,
    kv_block_stride,
    kv_token_stride,
    table_stride,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    FRESH: tl.constexpr,  # queries are as the projection made them
    NEW: tl.constexpr,  # heads behind the queries for each key head; 1: the value is the key; 0: the cache has both
    V_NORM: tl.constexpr,  # values are normalised, without a weight
    PAIRS: tl.constexpr,  # half of the rotated elements of a head
    HAS_NORM: tl.constexpr,
    KV_LIMIT: tl.constexpr,  # largest value of the cache type, 0 if no clamp is needed
    EARLY: tl.constexpr,  # read the first tile and prefetch the second before the previous kernel has ended
    AHEAD: tl.constexpr,  # read the block table one tile ahead
    TURNED: tl.constexpr,  # multiply an 8-bit cache from the left, see turned.py
    SOFTCAP: tl.constexpr,
    CHUNKED: tl.constexpr,  # attention stays within chunks of `window` positions
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    # Issue all three loads together: each has the latency of a key tile.
    count = tl.load(row_count_ptr + row)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    length = tl.load(row_start_ptr + row) + 1
    first = tl.maximum(first_visible(length - 1, window, CHUNKED), 0)
    cached = length - 1 if NEW > 0 else length
    # Splits are whole tiles and at least the shortest worthwhile split.
    span = tl.maximum(tl.cdiv(tl.cdiv(cached - first, SPLITS), N) * N, MIN_SPLIT)
    num_splits = tl.maximum(tl.cdiv(cached - first, span), 1)
    begin = first + split * span
    end = tl.minimum(begin + span, cached)
    m = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    n = tl.arange(0, N)
    in_head = d < D
    num_heads = tl.num_programs(0)
    table = tables_ptr + slot * table_stride
    head_offset = head * D + d
    # Pairs of 8-bit numbers are loaded as words, whose even and odd halves are multiplied by themselves.
    PAIRED: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv
    PACKED: tl.constexpr = 2 if PAIRED else 1
    word = tl.arange(0, D_PADDED // PACKED)
    in_words = word < D // PACKED
    word += head * (D // PACKED)
    has_work = (count == 1) & (split < num_splits)
    if EARLY:  # keys of earlier steps were written before the previous kernel started
        inside = (begin + n < end) & has_work
        offset = places(table, begin + n, inside, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        first_k, first_v = _load_tile(keys_ptr, values_ptr, offset, word, inside, in_words, PAIRED, TURNED)
        if OVERLAP:
            after = begin + N + n
            more = (after < end) & has_work
            offset = places(table, after, more, kv_block_stride, kv_token_stride, BLOCK_SIZE) + head * D
            size = tl.where(more, D * (keys_ptr.dtype.element_ty.primitive_bitwidth // 8), 0)
            prefetch_rows(keys_ptr + offset, size)
            prefetch_rows(values_ptr + offset, size)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if has_work == 0:
        return

    in_group = m < GROUP
    q_heads = head * GROUP + m
    keep = in_group[:, None] & in_head[None, :]
    q_at = q_ptr + row.to(tl.int64) * q_stride
    if NEW > 0:
        k_at = q_at + (num_heads * GROUP + head + tl.arange(0, 1))[:, None] * D
        one = in_head[None, :]
        if EARLY:  # otherwise registers are scarce
            new_v = new_value(k_at + (NEW - 1) * num_heads * D, d, one, eps, D, V_NORM)
            new_k = rotated(k_at, k_norm_ptr, cos_ptr, sin_ptr, row, d, one, eps, D, PAIRS, HAS_NORM)
    if FRESH:
        q = rotated(q_at + q_heads[:, None] * D, q_norm_ptr, cos_ptr, sin_ptr, row, d, keep, eps, D, PAIRS, HAS_NORM)
        q = q.to(q_ptr.dtype.element_ty)
    else:
        q = tl.load(q_at + q_heads[:, None] * D + d[None, :], mask=keep, other=0.0)
    best, total = sinks_of(sinks_ptr, q_heads, in_group, SINKS)
    if SINKS:  # exactly one split of a context has the sinks
        best = tl.where(split == 0, best, float("-inf"))
        total = tl.where(split == 0, total, 0.0)
    part, q_odd, factor = q, q, scale_log2
    acc = tl.zeros([M, D_PADDED // PACKED], tl.float32)
    if TURNED:
        part, q_odd, factor = turned_queries(q, scale_log2)
        acc = tl.zeros([D_PADDED // PACKED, M], tl.float32)
    elif PAIRED:
        part, q_odd = tl.split(tl.reshape(q, [M, D_PADDED // 2, 2]))
    acc_odd = acc
    if EARLY:
        best, total, acc, acc_odd = _take_in(
            part,
            q_odd,
            first_k,
            first_v,
            inside,
            best,
            total,
            acc,
            acc_odd,
            factor,
            PAIRED,
            TURNED,
            SOFTCAP,
            PRECISION,
            OVERLAP,
        )
        begin += N
    best, total, acc, acc_odd = _take_in_all(
        part,
        q_odd,
        keys_ptr,
        values_ptr,
        table,
        begin,
        end,
        n,
        kv_block_stride,
        kv_token_stride,
        word,
        in_words,
        best,
        total,
        acc,
        acc_odd,
        factor,
        BLOCK_SIZE,
        N,
        AHEAD,
        PAIRED,
        TURNED,
        SOFTCAP,
        PRECISION,
        OVERLAP,
    )
    if TURNED:
        acc = turned_back(acc, acc_odd)
    elif PAIRED:
        acc = tl.reshape(tl.join(acc, acc_odd), [M, D_PADDED])

    if NEW > 0 and split == num_splits - 1:
        if not EARLY:
            new_v = new_value(k_at + (NEW - 1) * num_heads * D, d, one, eps, D, V_NORM)
            new_k = rotated(k_at, k_norm_ptr, cos_ptr, sin_ptr, row, d, one, eps, D, PAIRS, HAS_NORM)
        block = tl.load(table + cached // BLOCK_SIZE).to(tl.int64)
        place = block * kv_block_stride + (cached % BLOCK_SIZE) * kv_token_stride + head_offset[None, :]
        best, total, acc = _take_in_new(
            q, new_k, new_v, keys_ptr + place, values_ptr + place, one, best, total, acc, scale_log2, KV_LIMIT, SOFTCAP
        )

    out_at = out_ptr + row.to(tl.int64) * out_stride + q_heads[:, None] * D + d[None, :]
    if num_splits == 1:
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep)
        return
    if SPLITS > 1:
        place = (row * num_heads + head) * SPLITS
        tl.store(partial_ptr + ((place + split) * GROUP + m[:, None]) * D + d[None, :], acc / total[:, None], mask=keep)
        tl.store(lse_ptr + (place + split) * GROUP + m, best + tl.log2(total), mask=in_group)
        tl.debug_barrier()
        counter = arrived_ptr + row * num_heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.debug_barrier()
            joined = _joined_splits(
                partial_ptr, lse_ptr, place, num_splits, m, d, in_group, keep, GROUP, M, D, D_PADDED
            )
            tl.store(out_at, joined.to(out_ptr.dtype.element_ty), mask=keep)
            tl.store(counter, 0)
