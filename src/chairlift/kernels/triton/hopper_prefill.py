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

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from chairlift.kernels.triton.attention import LOG2_E
from chairlift.kernels.triton.launch import next_power_of_2

ROWS = gl.constexpr(128)  # query rows of a tile: tokens times the heads that share a key head
COLUMNS = gl.constexpr(64)  # of a box that is copied: 128 bytes of 16-bit numbers, the width of the swizzle
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _barrier(INSTRUCTION: gl.constexpr):
    """Run a barrier instruction once in each thread of a consumer. Triton itself uses the barriers below 8."""
    zeros = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    asm: gl.constexpr = INSTRUCTION + ", 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [zeros], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the other consumer has started its products."""
    if TURNS:
        _barrier("bar.sync 8" if CONSUMER == 0 else "bar.sync 9")


@gluon.jit
def _give_turn(CONSUMER: gl.constexpr, TURNS: gl.constexpr):
    """Let the other consumer start its products."""
    if TURNS:
        _barrier("bar.arrive 9" if CONSUMER == 0 else "bar.arrive 8")


@gluon.jit
def _work(item, work, GROUP_PADDED: gl.constexpr, N: gl.constexpr):
    """The key head, slot, first batch row, first position and number of queries of an item, and its key tiles."""
    tile_chunk, tile_offset, chunk_slot, chunk_row, chunk_start, chunk_count, num_tiles, kv_heads = work
    head = item % kv_heads
    tile = num_tiles - 1 - item // kv_heads  # later tiles of a prompt have longer contexts
    found = gl.load(tile_chunk + tile)
    chunk = gl.maximum(found, 0)
    offset = gl.load(tile_offset + tile)
    slot = gl.load(chunk_slot + chunk)
    row = gl.load(chunk_row + chunk) + offset
    start = gl.where(found < 0, 0, gl.load(chunk_start + chunk) + offset)
    count = gl.where(found < 0, 0, gl.minimum(gl.load(chunk_count + chunk) - offset, ROWS // GROUP_PADDED))
    return head, slot, row, start, count, gl.maximum(gl.cdiv(start + count, N), 1)


@gluon.jit
def _copy_tile(desc, boxes, full, empty, at, j, table, end, column, N: gl.constexpr, D: gl.constexpr,
               PAGE: gl.constexpr):  # fmt: skip
    """Copy key tile j as the `at`-th of a ring; blocks behind the last token become zeros."""
    STAGES: gl.constexpr = empty.shape[0]
    BOX: gl.constexpr = desc.block_shape[0]
    COUNT: gl.constexpr = N // BOX
    rows: gl.tuple = ()
    for i in gl.static_range(COUNT):  # all loads of the block table before the first use
        position = j * N + i * BOX
        block = gl.load(table + position // PAGE, mask=position < end, other=-1)
        rows += (block * PAGE + position % PAGE,)
    stage, done = at % STAGES, full.index(at % full.shape[0])
    mbarrier.wait(empty.index(stage), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(done, N * D * 2)
    for i in gl.static_range(COUNT):
        for half in gl.static_range(D // COLUMNS):
            box = boxes.index((stage * (D // COLUMNS) + half) * COUNT + i)
            tma.async_copy_global_to_shared(desc, [rows[i], column + half * COLUMNS], done, box)


@gluon.jit
def _clean(boxes, stage, first, end, N: gl.constexpr, D: gl.constexpr):
    """Zero the values behind the last token in its block, which may be NaN: a weight of 0 does not undo that."""
    BOX: gl.constexpr = boxes.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i = (end - 1 - first) // BOX
    position = first + i * BOX + gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    for half in gl.static_range(D // COLUMNS):
        box = boxes.index((stage * (D // COLUMNS) + half) * (N // BOX) + i)
        box.store(gl.where((position < end)[:, None], box.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _produce(k_desc, v_desc, k_boxes, v_boxes, bars, copied, work, tables, table_stride, num_items,
             GROUP_PADDED: gl.constexpr, N: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    k_full, k_empty, v_full, v_empty = bars
    at, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, slot, _, start, count, num_tiles = _work(item, work, GROUP_PADDED, N)
        table, end, column = tables + slot.to(gl.int64) * table_stride, start + count, head * D
        _copy_tile(k_desc, k_boxes, k_full, k_empty, at, 0, table, end, column, N, D, PAGE)
        for j in range(1, num_tiles):
            _copy_tile(k_desc, k_boxes, k_full, k_empty, at + j, j, table, end, column, N, D, PAGE)
            _copy_tile(v_desc, v_boxes, v_full, v_empty, at + j - 1, j - 1, table, end, column, N, D, PAGE)
        at += num_tiles
        _copy_tile(v_desc, v_boxes, copied, v_empty, at - 1, num_tiles - 1, table, end, column, N, D, PAGE)
        mbarrier.wait(copied.index(0), phase)
        stage = (at - 1) % v_full.shape[0]
        _clean(v_boxes, stage, (num_tiles - 1) * N, end, N, D)
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
def _packed(weights, dtype: gl.constexpr, PACK: gl.constexpr):
    """Weights in 16 bits; with PACK two to a word, so that a loop carries words."""
    if PACK:
        low, high = gl.split(gl.reshape(weights, [64, weights.shape[1] // 2, 2]))
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $2;"
        found = gl.inline_asm_elementwise(asm, "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1)
    else:
        found = weights.to(dtype)
    return found


@gluon.jit
def _operand(packed, dtype: gl.constexpr, layout: gl.constexpr, PACK: gl.constexpr):
    """The left operand of a product."""
    if PACK:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        pairs = gl.reshape(gl.join(low, high), [64, packed.shape[1] * 2])
        found = gl.convert_layout(pairs.to(dtype, bitcast=True), layout)
    else:
        found = gl.convert_layout(packed, layout)
    return found


@gluon.jit
def _causal(scores, first, seen_by, layout: gl.constexpr, N: gl.constexpr):
    position = first + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    return gl.where(position[None, :] <= seen_by[:, None], scores, float("-inf"))


@gluon.jit
def _step(at, first, q, k_tiles, v_tiles, bars, p, acc, best, total, seen_by, scale, CONSUMER: gl.constexpr,
          TURNS: gl.constexpr, EARLY: gl.constexpr, PACK: gl.constexpr, MASKED: gl.constexpr, N: gl.constexpr,
          D: gl.constexpr):  # fmt: skip
    """Scores of a key tile, the `at`-th of the ring, and the sum of the tile before with its weights `p`."""
    k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_full.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage, before, phase = at % STAGES, (at - 1) % STAGES, ((at - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    _take_turn(CONSUMER, TURNS)
    none = gl.zeros([64, N], gl.float32, s_layout)
    scores = warpgroup_mma(q, k_tiles.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    acc = warpgroup_mma(_operand(p, q.dtype, p_layout, PACK), v_tiles.index(before), acc, is_async=True)
    _give_turn(CONSUMER, TURNS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if EARLY:
        mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        scores = _causal(scores, first, seen_by, s_layout, N)
    weights, shrink, best, total = _softmax(scores, best, total, scale)
    # The assembler moves the wait for the sum up, before the softmax, unless another basic block begins in between:
    # wait once more for values that are there.
    mbarrier.wait(v_full.index(before), phase)
    acc, weights, total = warpgroup_mma_wait(0, deps=[acc, weights, total])
    if not EARLY:
        mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(v_empty.index(before), count=1)
    p = _packed(weights, q.dtype, PACK)
    return p, acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None], best, total


@gluon.jit
def _consume(pointers, q_rows, k_tiles, v_tiles, bars, work, strides, scale, num_items, CONSUMER: gl.constexpr,
             TURNS: gl.constexpr, EARLY: gl.constexpr, PACK: gl.constexpr, SINKS: gl.constexpr, GROUP: gl.constexpr,
             GROUP_PADDED: gl.constexpr, N: gl.constexpr, D: gl.constexpr):  # fmt: skip
    q_ptr, out_ptr, sinks_ptr = pointers
    q_stride, out_stride = strides
    k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_full.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    m = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    rows = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    token, member = m // GROUP_PADDED, m % GROUP_PADDED
    q = q_rows.index(CONSUMER)
    at = 0
    if CONSUMER == 1:
        _give_turn(CONSUMER, TURNS)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, _, row, start, count, num_tiles = _work(item, work, GROUP_PADDED, N)
        keep = ((token < count) & (member < GROUP))[:, None]
        place = (row + token).to(gl.int64)[:, None]
        column = ((head * GROUP + member) * D)[:, None] + d[None, :]
        q.store(gl.load(q_ptr + place * q_stride + column, mask=keep, other=0.0))
        fence_async_shared()
        seen_by = start + rows // GROUP_PADDED
        best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.zeros([64, D], gl.float32, o_layout)

        mbarrier.wait(k_full.index(at % STAGES), (at // STAGES) & 1)
        _take_turn(CONSUMER, TURNS)
        none = gl.zeros([64, N], gl.float32, s_layout)
        scores = warpgroup_mma(q, k_tiles.index(at % STAGES).permute([1, 0]), none, use_acc=False, is_async=True)
        _give_turn(CONSUMER, TURNS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(at % STAGES), count=1)
        weights, _, best, total = _softmax(_causal(scores, 0, seen_by, s_layout, N), best, total, scale)
        p = _packed(weights, q.dtype, PACK)
        num_whole = gl.maximum((start + 1) // N, 1)  # tiles that all rows see as a whole, or the first
        for j in range(1, num_whole):
            p, acc, best, total = _step(
                at + j, j * N, q, k_tiles, v_tiles, bars, p, acc, best, total, seen_by, scale, CONSUMER, TURNS, EARLY,
                PACK, False, N, D,
            )  # fmt: skip
        for j in range(num_whole, num_tiles):
            p, acc, best, total = _step(
                at + j, j * N, q, k_tiles, v_tiles, bars, p, acc, best, total, seen_by, scale, CONSUMER, TURNS, EARLY,
                PACK, True, N, D,
            )  # fmt: skip
        at += num_tiles
        mbarrier.wait(v_full.index((at - 1) % STAGES), ((at - 1) // STAGES) & 1)
        p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
        acc = warpgroup_mma(_operand(p, q.dtype, p_layout, PACK), v_tiles.index((at - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((at - 1) % STAGES), count=1)

        if SINKS:
            shared = rows % GROUP_PADDED
            sink = gl.load(sinks_ptr + head * GROUP + shared, mask=shared < GROUP, other=0.0)
            total += gl.exp2(sink * 1.4426950408889634 - best)
        q.store((acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]).to(q.dtype))
        gl.store(out_ptr + place * out_stride + column, q.load(wide), mask=keep)
    if CONSUMER == 0:
        _take_turn(CONSUMER, TURNS)  # the last one that consumer 1 gave


@gluon.jit(do_not_specialize=["num_tiles", "kv_heads", "table_stride"])
def _hopper_prefill_kernel(
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
    N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    EARLY: gl.constexpr,
    PACK: gl.constexpr,
    SINKS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    BOX: gl.constexpr = k_desc.block_shape[0]
    BOXES: gl.constexpr = STAGES * (N // BOX) * (D // COLUMNS)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, COLUMNS], k_desc.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, COLUMNS], v_desc.layout)
    # A tile is the boxes of its first columns, one below the other, and then those of its last.
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, N, D], k_desc.layout)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, N, D], v_desc.layout)
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
            (_consume, (pointers, q_rows, k_tiles, v_tiles, bars, work, strides, scale, items, 0, TURNS, EARLY, PACK,
                        SINKS, GROUP, GROUP_PADDED, N, D)),
            (_consume, (pointers, q_rows, k_tiles, v_tiles, bars, work, strides, scale, items, 1, TURNS, EARLY, PACK,
                        SINKS, GROUP, GROUP_PADDED, N, D)),
            (_produce, (k_desc, v_desc, k_boxes, v_boxes, bars, copied, work, tables_ptr, table_stride, items,
                        GROUP_PADDED, N, D, PAGE)),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip


def hopper_prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    tables: Tensor,
    tile_chunk: Tensor,
    tile_offset: Tensor,
    tile_queries: int,
    chunk_slot: Tensor,
    chunk_row: Tensor,
    chunk_start: Tensor,
    chunk_count: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    tiling: tuple[int, int] = (128, 2),
    turns: bool = True,
    early: bool = True,
    pack: bool = True,
    programs: int | None = None,
) -> None:
    """Attention of prompt chunks as `prefill_attention` computes it, where `obstacles` finds none."""
    _, num_heads, dim = q.shape
    num_blocks, page, kv_heads, _ = keys.shape
    group = next_power_of_2(num_heads // kv_heads)
    assert tile_queries * group == ROWS.value
    n, stages = tiling
    described = (
        TensorDescriptor(side, [num_blocks * page, kv_heads * dim], [side.stride(1), 1], [min(page, n), 64], BOX_LAYOUT)
        for side in (keys, values)
    )
    items = len(tile_chunk) * kv_heads
    _hopper_prefill_kernel[(min(items, programs or num_multiprocessors(q.device)),)](
        q,
        *described,
        out,
        q if sinks is None else sinks,
        tables,
        tile_chunk,
        tile_offset,
        chunk_slot,
        chunk_row,
        chunk_start,
        chunk_count,
        len(tile_chunk),
        kv_heads,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        scale * LOG2_E,
        GROUP=num_heads // kv_heads,
        GROUP_PADDED=group,
        D=dim,
        PAGE=page,
        N=n,
        STAGES=stages,
        TURNS=turns,
        EARLY=early,
        PACK=pack,
        SINKS=sinks is not None,
        num_warps=4,
    )


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
