"""Low-rank terms of products on a GPU, whose rows may have different adapters.

Two kernels: rows are shrunk to the ranks, then expanded and added. A table has the address of each matrix, so that a
captured step reads whatever adapters are in memory when it is replayed. With few rows every program has one of them;
with many it has a tile of neighbours, which are mostly of one prompt, and goes through the adapters in the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.adapter_table import MAX_PARTS, WIDTH
from chairlift.kernels.triton.launch import cdiv, overlapping

MOST_RANKS = 1536  # All parts of a product count together.
FEW_ROWS = 128  # up to this many, a program for each row reads no more than tiles would
TILE = 32  # rows of a program, if there are many
RANKS = 16  # They are computed together.
SHRINK_COLUMNS, EXPAND_COLUMNS = 256, 256
SPLITS = 4  # parts of the sum over the columns, for few rows


@triton.jit
def _entry(slots_ptr, table_ptr, place, k, number, products, K: tl.constexpr, WIDTH: tl.constexpr):
    """The adapter slot of a row, and its entry of the table; entry 0 if it has none."""
    slot = tl.load(slots_ptr + place * K + k)
    return slot, table_ptr + (tl.maximum(slot, 0).to(tl.int64) * products + number) * WIDTH


@triton.jit(do_not_specialize=["number"])
def shrink_rows_kernel(
    x_ptr,  # [R, depth]
    picked_ptr,  # [R]: the row of the step that each one is
    slots_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    table_ptr,  # [slots, products, WIDTH] int64
    shrunk_ptr,  # [R, K, SPLITS, MOST] float32
    number,
    products,
    depth,
    stride,
    PICKS: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(picked_ptr + row).to(tl.int64) if PICKS else row
    part = tl.cdiv(tl.cdiv(depth, SPLITS), COLUMNS) * COLUMNS
    start = split * part
    end = tl.minimum(start + part, depth)
    for k in tl.static_range(K):
        slot, entry = _entry(slots_ptr, table_ptr, place, k, number, products, K, WIDTH)
        if slot >= 0:
            rank = tl.load(entry + 1).to(tl.int32)
            matrix = tl.load(entry).to(tl.pointer_type(TYPE))
            weight = tl.load(weights_ptr + place * K + k)
            for first in range(0, rank, RANKS):
                r = first + tl.arange(0, RANKS)
                total = tl.zeros([RANKS], dtype=tl.float32)
                for begin in range(start, end, COLUMNS):
                    c = begin + tl.arange(0, COLUMNS)
                    x = tl.load(x_ptr + row * stride + c, mask=c < end, other=0.0).to(tl.float32)
                    inside = (r < rank)[:, None] & (c < end)[None, :]
                    a = tl.load(matrix + r[:, None] * depth + c[None, :], mask=inside, other=0.0).to(tl.float32)
                    total += tl.sum(a * x[None, :], 1)
                out = ((row * K + k) * SPLITS + split) * MOST + r
                tl.store(shrunk_ptr + out, total * weight, mask=r < rank)


@triton.jit(do_not_specialize=["number"])
def expand_rows_kernel(
    out_ptr,  # [R, channels]: the terms are added to it
    picked_ptr,
    slots_ptr,
    table_ptr,
    shrunk_ptr,
    number,
    products,
    channels,
    stride,
    PICKS: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(picked_ptr + row).to(tl.int64) if PICKS else row
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    some = False
    for k in tl.static_range(K):
        slot, entry = _entry(slots_ptr, table_ptr, place, k, number, products, K, WIDTH)
        if slot >= 0:
            count, before = tl.load(entry + 3), 0
            for part in tl.static_range(PARTS):
                if part < count:
                    first = tl.load(entry + 4 + 4 * part).to(tl.int32)
                    size = tl.load(entry + 5 + 4 * part).to(tl.int32)
                    rank = tl.load(entry + 6 + 4 * part).to(tl.int32)
                    if (first < (block + 1) * COLUMNS) & (first + size > block * COLUMNS):
                        some = True
                        matrix = tl.load(entry + 7 + 4 * part).to(tl.pointer_type(TYPE))
                        mine = (n >= first) & (n < first + size)
                        for begin in range(0, rank, RANKS):
                            r = begin + tl.arange(0, RANKS)
                            values = tl.zeros([RANKS], dtype=tl.float32)
                            for split in tl.static_range(SPLITS):
                                at = ((row * K + k) * SPLITS + split) * MOST + before + r
                                values += tl.load(shrunk_ptr + at, mask=r < rank, other=0.0)
                            inside = (r < rank)[:, None] & mine[None, :]
                            at = r[:, None] * size + (n - first)[None, :]
                            b = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32)
                            total += tl.sum(b * values[:, None], 0)
                    before += rank
    if some:
        at = out_ptr + row * stride + n
        old = tl.load(at, mask=n < channels, other=0.0).to(tl.float32)
        tl.store(at, (old + total).to(out_ptr.dtype.element_ty), mask=n < channels)


@triton.jit(do_not_specialize=["number", "rows"])
def shrink_tiles_kernel(
    x_ptr,
    picked_ptr,
    slots_ptr,
    weights_ptr,
    table_ptr,
    shrunk_ptr,  # [R, K, 1, MOST] float32
    number,
    products,
    depth,
    stride,
    rows,
    PICKS: tl.constexpr,
    K: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(picked_ptr + m, mask=m < rows, other=0).to(tl.int64) if PICKS else m
    slots = tl.load(slots_ptr + place * K + k, mask=m < rows, other=-1)
    weights = tl.load(weights_ptr + place * K + k, mask=m < rows, other=0.0)
    slot = tl.max(slots, 0)
    while slot >= 0:
        mine = slots == slot
        entry = table_ptr + (slot.to(tl.int64) * products + number) * WIDTH
        rank = tl.load(entry + 1).to(tl.int32)
        matrix = tl.load(entry).to(tl.pointer_type(TYPE))
        for first in range(0, rank, RANKS):
            r = first + tl.arange(0, RANKS)
            total = tl.zeros([TILE, RANKS], dtype=tl.float32)
            for begin in range(0, depth, COLUMNS):
                c = begin + tl.arange(0, COLUMNS)
                wanted = mine[:, None] & (c < depth)[None, :]
                x = tl.load(x_ptr + m[:, None] * stride + c[None, :], mask=wanted, other=0.0).to(TYPE)
                inside = (r < rank)[None, :] & (c < depth)[:, None]
                a = tl.load(matrix + r[None, :] * depth + c[:, None], mask=inside, other=0.0)
                total = tl.dot(x, a, total, input_precision="ieee")
            at = (m[:, None] * K + k) * MOST + r[None, :]
            tl.store(shrunk_ptr + at, total * weights[:, None], mask=mine[:, None] & (r < rank)[None, :])
        slots = tl.where(mine, -1, slots)
        slot = tl.max(slots, 0)


@triton.jit(do_not_specialize=["number", "rows"])
def expand_tiles_kernel(
    out_ptr,
    picked_ptr,
    slots_ptr,
    table_ptr,
    shrunk_ptr,
    number,
    products,
    channels,
    stride,
    rows,
    PICKS: tl.constexpr,
    K: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    block = tl.program_id(1)
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(picked_ptr + m, mask=m < rows, other=0).to(tl.int64) if PICKS else m
    total = tl.zeros([TILE, COLUMNS], dtype=tl.float32)
    has = m < 0
    for k in tl.static_range(K):
        slots = tl.load(slots_ptr + place * K + k, mask=m < rows, other=-1)
        has = has | (slots >= 0)
        slot = tl.max(slots, 0)
        while slot >= 0:
            mine = slots == slot
            entry = table_ptr + (slot.to(tl.int64) * products + number) * WIDTH
            count, before = tl.load(entry + 3), 0
            for part in tl.static_range(PARTS):
                if part < count:
                    first = tl.load(entry + 4 + 4 * part).to(tl.int32)
                    size = tl.load(entry + 5 + 4 * part).to(tl.int32)
                    rank = tl.load(entry + 6 + 4 * part).to(tl.int32)
                    if (first < (block + 1) * COLUMNS) & (first + size > block * COLUMNS):
                        matrix = tl.load(entry + 7 + 4 * part).to(tl.pointer_type(TYPE))
                        own = (n >= first) & (n < first + size)
                        for begin in range(0, rank, RANKS):
                            r = begin + tl.arange(0, RANKS)
                            at = (m[:, None] * K + k) * MOST + before + r[None, :]
                            wanted = mine[:, None] & (r < rank)[None, :]
                            values = tl.load(shrunk_ptr + at, mask=wanted, other=0.0).to(TYPE)
                            inside = (r < rank)[:, None] & own[None, :]
                            at = r[:, None] * size + (n - first)[None, :]
                            b = tl.load(matrix + at, mask=inside, other=0.0)
                            total = tl.dot(values, b, total, input_precision="ieee")
                    before += rank
            slots = tl.where(mine, -1, slots)
            slot = tl.max(slots, 0)
    at = out_ptr + m[:, None] * stride + n[None, :]
    inside = (has & (m < rows))[:, None] & (n < channels)[None, :]
    old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (old + total).to(out_ptr.dtype.element_ty), mask=inside)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def add_terms(
    x: Tensor,
    out: Tensor,
    table: Tensor,
    number: int,
    slots: Tensor,
    weights: Tensor,
    picked: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Add the terms of product `number` to out [R, channels], multiplied from x [R, depth].

    `slots`, `weights` [T, K]: the adapters of each row of the step; `picked` [R]: the rows of the step that these are,
    if they are not all; `dtype`: that of the adapters.
    """
    count, depth = x.shape
    most = slots.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    assert out.stride(1) == 1
    few = count <= FEW_ROWS
    splits = SPLITS if few else 1
    shrunk = torch.empty(count, most, splits, MOST_RANKS, dtype=torch.float32, device=x.device)
    common = {"PICKS": picked is not None, "K": most, "MOST": MOST_RANKS, "WIDTH": WIDTH, "RANKS": RANKS}
    common |= {"TYPE": _TYPES[dtype], "num_warps": 4, **overlapping(x.device)}
    index, products = slots if picked is None else picked, table.shape[1]
    reads = x, index, slots, weights, table, shrunk, number, products, depth, x.stride(0)
    adds = out, index, slots, table, shrunk, number, products, out.shape[1], out.stride(0)
    if few:
        shrink_rows_kernel[(count, splits)](*reads, SPLITS=splits, COLUMNS=SHRINK_COLUMNS, **common)
        blocks = cdiv(out.shape[1], EXPAND_COLUMNS)
        expand_rows_kernel[(count, blocks)](*adds, SPLITS=splits, PARTS=MAX_PARTS, COLUMNS=EXPAND_COLUMNS, **common)
        return
    tiles = cdiv(count, TILE)
    shrink_tiles_kernel[(tiles, most)](*reads, count, COLUMNS=64, TILE=TILE, **common)
    blocks = cdiv(out.shape[1], 128)
    expand_tiles_kernel[(tiles, blocks)](*adds, count, PARTS=MAX_PARTS, COLUMNS=128, TILE=TILE, **common)
