"""Paged attention of long prompt chunks on Hopper, in Gluon, with warps that have different tasks.

The contract is that of attention.py. A program stays on its multiprocessor and computes one tile of queries after the
other, for one key head each, the longest contexts first. It has three groups of warps:

    producer        copies tiles of keys and values through the block table into two rings of shared memory
    two consumers   64 rows of the tile each: scores, softmax and weighted sums, on the tensor cores

A consumer starts the scores of key tile j before the sum of tile j - 1, so that its softmax runs beside a product. The
two take turns in starting products, so that one computes its softmax while the products of the other run:

    consumer 0   | products | softmax  | products | softmax  |
    consumer 1              | products | softmax  | products | softmax  |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(128)  # query rows of a tile: tokens times the heads that share a key head
KEYS = gl.constexpr(128)  # A tile has this many.
STAGES = gl.constexpr(2)  # tiles of a ring
COLUMNS = gl.constexpr(64)  # A box that is copied has this many: 128 bytes of 16-bit numbers, the width of the swizzle.
SCORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))


@gluon.constexpr_function
def _sum_layout(dim):
    """The registers of a weighted sum of values."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.jit
def _barrier(INSTRUCTION: gl.constexpr):
    """Run a barrier instruction once in each thread of a consumer. Triton itself uses the barriers below 8."""
    zeros = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    asm: gl.constexpr = INSTRUCTION + ", 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [zeros], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr):
    """Wait until the other consumer has started its products."""
    _barrier("bar.sync 8" if CONSUMER == 0 else "bar.sync 9")


@gluon.jit
def _give_turn(CONSUMER: gl.constexpr):
    """Let the other consumer start its products."""
    _barrier("bar.arrive 9" if CONSUMER == 0 else "bar.arrive 8")


@gluon.jit
def _work(item, work, GROUP_PADDED: gl.constexpr):
    """The key head, slot, first batch row, first position and number of queries of an item, and its key tiles.

    Padding has no key tiles."""
    tile_chunk, tile_offset, chunk_slot, chunk_row, chunk_start, chunk_count, num_tiles, kv_heads = work
    head = item % kv_heads
    tile = num_tiles - 1 - item // kv_heads  # later tiles of a prompt have longer contexts
    found = gl.load(tile_chunk + tile)
    chunk = gl.maximum(found, 0)
    offset = gl.load(tile_offset + tile)
    slot = gl.load(chunk_slot + chunk)
    row = gl.load(chunk_row + chunk) + offset
    start = gl.load(chunk_start + chunk) + offset
    count = gl.minimum(gl.load(chunk_count + chunk) - offset, ROWS // GROUP_PADDED)
    return head, slot, row, start, count, gl.where(found < 0, 0, gl.cdiv(start + count, KEYS))


@gluon.jit
def _copy_tile(desc, boxes, full, empty, at, j, table, end, column, D: gl.constexpr, PAGE: gl.constexpr):
    """Copy key tile j as the `at`-th of a ring; blocks behind the last token become zeros."""
    BOX: gl.constexpr = desc.block_shape[0]
    COUNT: gl.constexpr = KEYS // BOX
    rows: gl.tuple = ()
    for i in gl.static_range(COUNT):  # all loads of the block table before the first use
        position = j * KEYS + i * BOX
        block = gl.load(table + position // PAGE, mask=position < end, other=-1)
        rows += (block * PAGE + position % PAGE,)
    stage, done = at % STAGES, full.index(at % full.shape[0])
    mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(done, KEYS * D * 2)
    for i in gl.static_range(COUNT):
        for half in gl.static_range(D // COLUMNS):
            box = boxes.index((stage * (D // COLUMNS) + half) * COUNT + i)
            tma.async_copy_global_to_shared(desc, [rows[i], column + half * COLUMNS], done, box)


@gluon.jit
def _clean(boxes, stage, first, end, D: gl.constexpr):
    """Zero the values behind the last token in its block, which may be NaN: a weight of 0 does not undo that."""
    BOX: gl.constexpr = boxes.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i = (end - 1 - first) // BOX
    position = first + i * BOX + gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    for half in gl.static_range(D // COLUMNS):
        box = boxes.index((stage * (D // COLUMNS) + half) * (KEYS // BOX) + i)
        box.store(gl.where((position < end)[:, None], box.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _produce(k_desc, v_desc, k_boxes, v_boxes, bars, copied, work, tables, table_stride, num_items,
             GROUP_PADDED: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Copy the keys and values of all items of this program, keys one tile ahead of values."""
    k_full, k_empty, v_full, v_empty = bars
    at, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, slot, _, start, count, num_tiles = _work(item, work, GROUP_PADDED)
        if num_tiles > 0:
            table, end, column = tables + slot.to(gl.int64) * table_stride, start + count, head * D
            _copy_tile(k_desc, k_boxes, k_full, k_empty, at, 0, table, end, column, D, PAGE)
            for j in range(1, num_tiles):
                _copy_tile(k_desc, k_boxes, k_full, k_empty, at + j, j, table, end, column, D, PAGE)
                _copy_tile(v_desc, v_boxes, v_full, v_empty, at + j - 1, j - 1, table, end, column, D, PAGE)
            at += num_tiles
            _copy_tile(v_desc, v_boxes, copied, v_empty, at - 1, num_tiles - 1, table, end, column, D, PAGE)
            mbarrier.wait(copied.index(0), phase)
            stage = (at - 1) % STAGES
            _clean(v_boxes, stage, (num_tiles - 1) * KEYS, end, D)
            mbarrier.arrive(v_full.index(stage), count=1)
            phase ^= 1


@gluon.jit
def _softmax(scores, best, total, scale):
    """Weights of a tile, the factor of what was summed before, and the new maximum and sum."""
    new_best = gl.maximum(best, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_best[:, None])
    shrink = gl.exp2(best - new_best)
    return weights, shrink, new_best, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _packed(weights, dtype: gl.constexpr):
    """Weights in 16 bits, two to a word, so that a loop carries words."""
    low, high = gl.split(gl.reshape(weights, [64, weights.shape[1] // 2, 2]))
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _add_values(packed, values, acc, dtype: gl.constexpr):
    """Start the product of packed weights and a tile of values, which is added to `acc`."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    pairs = gl.reshape(gl.join(low, high), [64, packed.shape[1] * 2])
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(pairs.to(dtype, bitcast=True), layout), values, acc, is_async=True)


@gluon.jit
def _scores(q, keys):
    """Start the product of queries and a tile of keys."""
    none = gl.zeros([64, KEYS], gl.float32, SCORE_LAYOUT)
    return warpgroup_mma(q, keys.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _causal(scores, first, seen_by):
    """Hide the keys of a tile that begins at `first` behind the last position that each row sees."""
    position = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE_LAYOUT))
    return gl.where(position[None, :] <= seen_by[:, None], scores, float("-inf"))


@gluon.jit
def _step(at, first, q, k_tiles, v_tiles, bars, p, acc, best, total, seen_by, scale, CONSUMER: gl.constexpr,
          MASKED: gl.constexpr):  # fmt: skip
    """Scores of a key tile, the `at`-th of the ring, and the sum of the tile before with its weights `p`."""
    k_full, k_empty, v_full, v_empty = bars
    stage, before, phase = at % STAGES, (at - 1) % STAGES, ((at - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    _take_turn(CONSUMER)
    scores = _scores(q, k_tiles.index(stage))
    mbarrier.wait(v_full.index(before), phase)
    acc = _add_values(p, v_tiles.index(before), acc, q.dtype)
    _give_turn(CONSUMER)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        scores = _causal(scores, first, seen_by)
    weights, shrink, best, total = _softmax(scores, best, total, scale)
    # The assembler moves the wait for the sum up, before the softmax, unless another basic block begins in between:
    # wait once more for values that are there.
    mbarrier.wait(v_full.index(before), phase)
    acc, weights, total = warpgroup_mma_wait(0, deps=[acc, weights, total])
    mbarrier.arrive(v_empty.index(before), count=1)
    p = _packed(weights, q.dtype)
    return p, acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None], best, total


@gluon.jit
def _attend(at, num_tiles, start, q, k_tiles, v_tiles, bars, seen_by, scale, CONSUMER: gl.constexpr,
            D: gl.constexpr):  # fmt: skip
    """The sums of an item's values by their weights, the maxima of the scores and the sums of the weights."""
    k_full, k_empty, v_full, v_empty = bars
    best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    acc = gl.zeros([64, D], gl.float32, _sum_layout(D))
    mbarrier.wait(k_full.index(at % STAGES), (at // STAGES) & 1)
    _take_turn(CONSUMER)
    scores = _scores(q, k_tiles.index(at % STAGES))
    _give_turn(CONSUMER)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(at % STAGES), count=1)
    weights, _, best, total = _softmax(_causal(scores, 0, seen_by), best, total, scale)
    p = _packed(weights, q.dtype)
    num_whole = gl.maximum((start + 1) // KEYS, 1)  # tiles that all rows see as a whole, or the first
    for j in range(1, num_whole):
        p, acc, best, total = _step(
            at + j, j * KEYS, q, k_tiles, v_tiles, bars, p, acc, best, total, seen_by, scale, CONSUMER, False
        )
    for j in range(num_whole, num_tiles):
        p, acc, best, total = _step(
            at + j, j * KEYS, q, k_tiles, v_tiles, bars, p, acc, best, total, seen_by, scale, CONSUMER, True
        )
    last = at + num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = _add_values(p, v_tiles.index(last % STAGES), acc, q.dtype)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(last % STAGES), count=1)
    return acc, best, total


@gluon.jit
def _consume(pointers, q_rows, k_tiles, v_tiles, bars, work, strides, scale, num_items, CONSUMER: gl.constexpr,
             SINKS: gl.constexpr, GROUP: gl.constexpr, GROUP_PADDED: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Compute half of the rows of all items of this program."""
    q_ptr, out_ptr, sinks_ptr = pointers
    q_stride, out_stride = strides
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    m = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    rows = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE_LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    token, member = m // GROUP_PADDED, m % GROUP_PADDED
    q = q_rows.index(CONSUMER)
    at = 0
    if CONSUMER == 1:
        _give_turn(CONSUMER)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, _, row, start, count, num_tiles = _work(item, work, GROUP_PADDED)
        if num_tiles > 0:
            keep = ((token < count) & (member < GROUP))[:, None]
            place = (row + token).to(gl.int64)[:, None]
            column = ((head * GROUP + member) * D)[:, None] + d[None, :]
            q.store(gl.load(q_ptr + place * q_stride + column, mask=keep, other=0.0))
            fence_async_shared()
            seen_by = start + rows // GROUP_PADDED
            acc, best, total = _attend(at, num_tiles, start, q, k_tiles, v_tiles, bars, seen_by, scale, CONSUMER, D)
            at += num_tiles
            if SINKS:
                shared = rows % GROUP_PADDED
                sink = gl.load(sinks_ptr + head * GROUP + shared, mask=shared < GROUP, other=0.0)
                total += gl.exp2(sink * 1.4426950408889634 - best)
            q.store((acc / gl.convert_layout(total, gl.SliceLayout(1, _sum_layout(D)))[:, None]).to(q.dtype))
            gl.store(out_ptr + place * out_stride + column, q.load(wide), mask=keep)
    if CONSUMER == 0:
        _take_turn(CONSUMER)  # the last one that consumer 1 gave


@gluon.jit(do_not_specialize=["num_tiles", "kv_heads", "table_stride"])
def hopper_prefill_kernel(
    q_ptr,  # [T, heads, D]
    k_desc,  # the cache as [tokens, key heads * D]
    v_desc,
    out_ptr,  # [T, heads, D]
    sinks_ptr,  # [heads] float32, with SINKS only
    tables_ptr,
    tile_chunk_ptr,  # these as in attention.py
    tile_offset_ptr,
    chunk_slot_ptr,
    chunk_row_ptr,
    chunk_start_ptr,
    chunk_count_ptr,
    num_tiles,
    kv_heads,
    q_stride,
    out_stride,
    table_stride,
    scale,
    GROUP: gl.constexpr,
    GROUP_PADDED: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,  # tokens in a block of the cache
    SINKS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    BOX: gl.constexpr = k_desc.block_shape[0]
    BOXES: gl.constexpr = STAGES * (KEYS // BOX) * (D // COLUMNS)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, COLUMNS], k_desc.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, COLUMNS], v_desc.layout)
    # A tile is the boxes of its first columns, one below the other, and then those of its last.
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, KEYS, D], k_desc.layout)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, KEYS, D], v_desc.layout)
    q_rows = gl.allocate_shared_memory(dtype, [2, ROWS // 2, D], k_desc.layout)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    copied = gl.allocate_shared_memory(gl.int64, [1, 1], bar_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(copied.index(0), count=1)
    bars = (k_full, k_empty, v_full, v_empty)
    work = (tile_chunk_ptr, tile_offset_ptr, chunk_slot_ptr, chunk_row_ptr, chunk_start_ptr, chunk_count_ptr, num_tiles,
            kv_heads)  # fmt: skip
    pointers, strides, items = (q_ptr, out_ptr, sinks_ptr), (q_stride, out_stride), num_tiles * kv_heads
    gl.warp_specialize(
        [
            (_consume, (pointers, q_rows, k_tiles, v_tiles, bars, work, strides, scale, items, 0, SINKS, GROUP,
                        GROUP_PADDED, D)),
            (_consume, (pointers, q_rows, k_tiles, v_tiles, bars, work, strides, scale, items, 1, SINKS, GROUP,
                        GROUP_PADDED, D)),
            (_produce, (k_desc, v_desc, k_boxes, v_boxes, bars, copied, work, tables_ptr, table_stride, items,
                        GROUP_PADDED, D, PAGE)),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip
