"""The absorbed form of latent attention for single tokens on Hopper, in Gluon: tiles, barriers and warps by hand.

The tiles (64 cached positions) of all rows are one sequence, which is cut into equal ranges, one per program:

    rows          a a a a a a a | b | c c c | d d d d d
    programs      0 0 0 0 1 1 1   1   2 2 2   2 3 3 3 3       d has parts in programs 2 and 3

The schedule is computed from the rows' lengths on the device, so that a captured launch serves every batch. One warp
copies tiles by the tensor memory accelerator, 16 positions at a time, into a ring in shared memory; four warps multiply
them (wgmma, heads as columns). A tile's latents are copied in units of W columns with barriers of their own: a unit is
free for the next tile as soon as it has been multiplied as values. A row that lies in several programs has parts, which
a second kernel joins (hopper_decode.py).
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

N = gl.constexpr(64)  # positions of a tile: the rows of one wgmma
BOX = gl.constexpr(16)  # positions of one copy: blocks are multiples of it
PANEL = gl.constexpr(64)  # columns of one copy: 128 bytes, which the swizzled layout repeats
META_PARTS = gl.constexpr(1024)  # above the number of a row's parts


@gluon.jit
def _wait_for_predecessor():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _start_successor():
    text: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place_of(table, position, last_block, rows_per_block, BLOCK: gl.constexpr):
    """The row of the cache where the 16 positions from `position` begin; past the context: in its last block."""
    block = gl.load(table + gl.minimum(position // BLOCK, last_block))
    return block * rows_per_block + position % BLOCK


@gluon.jit
def _tiles_of(start, count):
    """Tiles of a row with its own token; padding rows have none."""
    return gl.where(count == 1, start // N + 1, 0)


@gluon.jit
def _begin_of(program, total_tiles, programs):
    """The first tile of a program's range."""
    return program * total_tiles // programs


@gluon.jit
def _owner_of(tile, total_tiles, programs):
    """The program whose range contains a tile."""
    return ((tile + 1) * programs - 1) // total_tiles


@gluon.jit
def _produce(
    desc, tables_ptr, table_stride, rows_per_block, slot_ptr, start_ptr, count_ptr,
    units, ropes, full, empty, rope_full, rope_empty, t0, t1, first_row, last_row, base,
    RANK: gl.constexpr, W: gl.constexpr, R: gl.constexpr, RR: gl.constexpr, BLOCK: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of a program's range, one after the other, as soon as there is room."""
    if OVERLAP:
        _wait_for_predecessor()
    G: gl.constexpr = RANK // W
    PANELS: gl.constexpr = W // PANEL
    PIECES: gl.constexpr = N // BOX
    done = 0  # tiles
    start = gl.load(start_ptr + first_row)
    count = gl.load(count_ptr + first_row)
    slot = gl.load(slot_ptr + first_row)
    for row in range(first_row, last_row + 1):
        tiles = _tiles_of(start, count)
        begin = gl.maximum(t0 - base, 0)
        end = gl.minimum(tiles, t1 - base)
        base += tiles
        table = tables_ptr + slot.to(gl.int64) * table_stride
        last_block = start // BLOCK
        # The next row's numbers and the next tile's blocks are read a round ahead of their use.
        after = gl.minimum(row + 1, last_row)
        start = gl.load(start_ptr + after)
        count = gl.load(count_ptr + after)
        slot = gl.load(slot_ptr + after)
        at0 = _place_of(table, begin * N, last_block, rows_per_block, BLOCK)
        at1 = _place_of(table, begin * N + 16, last_block, rows_per_block, BLOCK)
        at2 = _place_of(table, begin * N + 32, last_block, rows_per_block, BLOCK)
        at3 = _place_of(table, begin * N + 48, last_block, rows_per_block, BLOCK)
        for tile in range(begin, end):
            here = (at0, at1, at2, at3)
            ahead = (tile + 1) * N
            at0 = _place_of(table, ahead, last_block, rows_per_block, BLOCK)
            at1 = _place_of(table, ahead + 16, last_block, rows_per_block, BLOCK)
            at2 = _place_of(table, ahead + 32, last_block, rows_per_block, BLOCK)
            at3 = _place_of(table, ahead + 48, last_block, rows_per_block, BLOCK)
            for g in gl.static_range(G):
                unit = done * G + g
                stage = unit % R
                mbarrier.wait(empty.index(stage), (unit // R & 1) ^ 1)
                mbarrier.expect(full.index(stage), N * W * 2)
                for p in gl.static_range(PANELS):
                    for b in gl.static_range(PIECES):
                        piece = units.index((stage * PANELS + p) * PIECES + b)
                        place = [here[b], g * W + p * PANEL]
                        tma.async_copy_global_to_shared(desc, place, full.index(stage), piece)
            stage = done % RR
            mbarrier.wait(rope_empty.index(stage), (done // RR & 1) ^ 1)
            mbarrier.expect(rope_full.index(stage), N * PANEL * 2)
            for b in gl.static_range(PIECES):
                piece = ropes.index(stage * PIECES + b)
                tma.async_copy_global_to_shared(desc, [here[b], RANK], rope_full.index(stage), piece)
            done += 1


@gluon.jit
def _consume(
    q_ptr, q_rope_ptr, out_ptr, partial_ptr, lse_ptr, meta_ptr, q_stride, q_rope_stride, q_rope_head_stride, scale_log2,
    start_ptr, count_ptr, latents, ropes, queries, query_rope, weights, full, empty, rope_full, rope_empty,
    t0, t1, first_row, last_row, base, total_tiles, programs,
    HEADS: gl.constexpr, BH: gl.constexpr, RANK: gl.constexpr, W: gl.constexpr, R: gl.constexpr, RR: gl.constexpr,
):  # fmt: skip
    """Multiply the tiles of a program's range; write a row's result, or its part where others have parts, too."""
    G: gl.constexpr = RANK // W
    gl.static_assert(G == 2)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BH, 16])
    by_head: gl.constexpr = gl.SliceLayout(0, mma)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    cta = gl.program_id(0)
    h = gl.arange(0, BH, by_head)
    r = gl.arange(0, W, by_row)
    n = gl.arange(0, N, by_row)
    done = 0
    for row in range(first_row, last_row + 1):
        start = gl.load(start_ptr + row)
        tiles = _tiles_of(start, gl.load(count_ptr + row))
        length = start + 1
        begin = gl.maximum(t0 - base, 0)
        end = gl.minimum(tiles, t1 - base)
        if begin < end:
            qh = gl.arange(0, BH, gl.SliceLayout(1, wide))
            qc = gl.arange(0, W, gl.SliceLayout(0, wide))
            q_at = q_ptr + gl.cast(row, gl.int64) * q_stride + qh[:, None] * RANK + qc[None, :]
            for g in gl.static_range(G):
                queries.index(g).store(gl.load(q_at + g * W, mask=(qh < HEADS)[:, None], other=0.0))
            ph = gl.arange(0, BH, gl.SliceLayout(1, rope_layout))
            pc = gl.arange(0, PANEL, gl.SliceLayout(0, rope_layout))
            rope_at = (
                q_rope_ptr + gl.cast(row, gl.int64) * q_rope_stride + ph[:, None] * q_rope_head_stride + pc[None, :]
            )
            query_rope.store(gl.load(rope_at, mask=(ph < HEADS)[:, None], other=0.0))
            fence_async_shared()
            gl.thread_barrier()
            best = gl.full([BH], float("-inf"), gl.float32, by_head)
            sums = gl.zeros([N, BH], gl.float32, mma)
            acc0 = gl.zeros([W, BH], gl.float32, mma)
            acc1 = gl.zeros([W, BH], gl.float32, mma)
            for tile in range(begin, end):
                unit = done * G
                scores = gl.zeros([N, BH], gl.float32, mma)
                for g in gl.static_range(G):
                    stage = (unit + g) % R
                    mbarrier.wait(full.index(stage), (unit + g) // R & 1)
                    query = queries.index(g).permute((1, 0))
                    scores = warpgroup_mma(latents.index(stage), query, scores, use_acc=g > 0, is_async=True)
                rope_stage = done % RR
                mbarrier.wait(rope_full.index(rope_stage), done // RR & 1)
                query = query_rope.permute((1, 0))
                scores = warpgroup_mma(ropes.index(rope_stage), query, scores, use_acc=True, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
                # Slots past the end may hold anything: zero times NaN would be NaN.
                if (tile + 1) * N > length:
                    keep = (tile * N + gl.arange(0, N, gl.SliceLayout(1, wide)) < length)[:, None]
                    for g in gl.static_range(G):
                        view = latents.index((unit + g) % R)
                        view.store(gl.where(keep, view.load(wide), 0.0))
                scores = gl.where((tile * N + n < length)[:, None], scores * scale_log2, float("-inf"))
                new_best = gl.maximum(best, gl.max(scores, 0))
                chances = gl.exp2(scores - new_best[None, :])
                shrink = gl.exp2(best - new_best)
                best = new_best
                sums = sums * shrink[None, :] + chances
                weights.store(chances.to(gl.bfloat16))
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(rope_empty.index(rope_stage), count=1)
                shrink = shrink[None, :]
                first, second = unit % R, (unit + 1) % R
                acc0 = warpgroup_mma(latents.index(first).permute((1, 0)), weights, acc0 * shrink, is_async=True)
                acc1 = warpgroup_mma(latents.index(second).permute((1, 0)), weights, acc1 * shrink, is_async=True)
                acc0 = warpgroup_mma_wait(num_outstanding=1, deps=[acc0])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(first), count=1)
                acc1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc1])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(second), count=1)
                done += 1
            total = gl.sum(sums, 0)
            scale = (1.0 / total)[None, :]
            heads = (h < HEADS)[None, :]
            if (begin == 0) & (end == tiles):
                out_at = out_ptr + (gl.cast(row, gl.int64) * HEADS + h)[None, :] * RANK + r[:, None]
                gl.store(out_at, (acc0 * scale).to(out_ptr.dtype.element_ty), mask=heads)
                gl.store(out_at + W, (acc1 * scale).to(out_ptr.dtype.element_ty), mask=heads)
            else:
                part = (2 * cta + (begin == 0).to(gl.int32)) * HEADS + h
                part_at = partial_ptr + part.to(gl.int64)[None, :] * RANK + r[:, None]
                gl.store(part_at, acc0 * scale, mask=heads)
                gl.store(part_at + W, acc1 * scale, mask=heads)
                gl.store(lse_ptr + part, best + gl.log2(total), mask=h < HEADS)
            if begin == 0:
                last = _owner_of(base + tiles - 1, total_tiles, programs)
                gl.store(meta_ptr + row, cta * META_PARTS + last - cta + 1)
        base += tiles


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["rows"])
def hopper_decode_kernel(
    desc,  # cache [rows, RANK + PANEL], in boxes [BOX, PANEL]
    q_ptr,  # [T, HEADS, RANK]
    q_rope_ptr,  # [T, HEADS, PANEL]
    out_ptr,  # [T, HEADS, RANK]
    partial_ptr,  # [2 * programs, HEADS, RANK] float32
    lse_ptr,  # [2 * programs, HEADS] float32, in log 2
    meta_ptr,  # [rows] int32: first program and number of parts
    tables_ptr, slot_ptr, start_ptr, count_ptr,
    rows, q_stride, q_rope_stride, q_rope_head_stride, rows_per_block, table_stride, scale_log2,
    ROWS: gl.constexpr,  # a power of two, no less than `rows`
    HEADS: gl.constexpr,
    BH: gl.constexpr,  # HEADS, padded
    RANK: gl.constexpr,
    W: gl.constexpr,  # columns of a unit
    R: gl.constexpr,  # units of the ring of latents
    RR: gl.constexpr,  # tiles of the ring of rotated parts
    BLOCK: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor; see the top of this file."""
    G: gl.constexpr = RANK // W
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, ROWS, flat)
    start = gl.load(start_ptr + row, mask=row < rows, other=0)
    count = gl.load(count_ptr + row, mask=row < rows, other=0)
    tiles = _tiles_of(start, count)
    ends = gl.associative_scan(tiles, 0, _add)
    total_tiles = gl.maximum(gl.sum(tiles, 0), 1)
    programs = gl.minimum(gl.num_programs(0), total_tiles)
    cta = gl.program_id(0)
    t0 = gl.minimum(_begin_of(cta, total_tiles, programs), total_tiles)
    t1 = gl.minimum(_begin_of(cta + 1, total_tiles, programs), total_tiles)
    before = ends <= t0
    first_row = gl.sum(before.to(gl.int32), 0)
    base = gl.sum(gl.where(before, tiles, 0), 0)
    last_row = gl.minimum(gl.sum((ends <= t1 - 1).to(gl.int32), 0), rows - 1)
    first_row = gl.where(t0 < t1, gl.minimum(first_row, rows - 1), last_row + 1)

    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    latents = gl.allocate_shared_memory(gl.bfloat16, [R, N, W], tile_layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [RR, N, PANEL], tile_layout)
    queries = gl.allocate_shared_memory(gl.bfloat16, [G, BH, W], tile_layout)
    query_rope = gl.allocate_shared_memory(gl.bfloat16, [BH, PANEL], tile_layout)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout(2 * BH, 16, 2)
    weights = gl.allocate_shared_memory(gl.bfloat16, [N, BH], weights_layout)
    full = gl.allocate_shared_memory(gl.int64, [R, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [R, 1], mbarrier.MBarrierLayout())
    rope_full = gl.allocate_shared_memory(gl.int64, [RR, 1], mbarrier.MBarrierLayout())
    rope_empty = gl.allocate_shared_memory(gl.int64, [RR, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(R):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(RR):
        mbarrier.init(rope_full.index(i), count=1)
        mbarrier.init(rope_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    units = latents._reinterpret(gl.bfloat16, [R * (W // PANEL) * (N // BOX), BOX, PANEL], tile_layout)
    rope_pieces = ropes._reinterpret(gl.bfloat16, [RR * (N // BOX), BOX, PANEL], tile_layout)
    if OVERLAP:
        _wait_for_predecessor()
        _start_successor()
    gl.warp_specialize(
        [
            (_consume, (
                q_ptr, q_rope_ptr, out_ptr, partial_ptr, lse_ptr, meta_ptr, q_stride, q_rope_stride, q_rope_head_stride,
                scale_log2, start_ptr, count_ptr, latents, ropes, queries, query_rope, weights, full, empty, rope_full,
                rope_empty, t0, t1, first_row, last_row, base, total_tiles, programs, HEADS, BH, RANK, W, R, RR,
            )),
            (_produce, (
                desc, tables_ptr, table_stride, rows_per_block, slot_ptr, start_ptr, count_ptr, units, rope_pieces,
                full, empty, rope_full, rope_empty, t0, t1, first_row, last_row, base, RANK, W, R, RR, BLOCK, OVERLAP,
            )),
        ],
        [1],
        [64],
    )  # fmt: skip
