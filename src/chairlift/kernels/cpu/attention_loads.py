"""Stores keys and values; loads those of a sequence through its block table into tiles of float32, or prefetches them.

Keys and values of 8 bits have a scale for each token and head, a float32 behind the numbers of its row. Scales are not
applied to what is loaded, but to the scores and to the weights of the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from chairlift.kernels.cpu.attention_work import SCALE_BYTES
from chairlift.kernels.cpu.scalar_math import FAST, compiled, narrow, nearest, scale_of, widen
from chairlift.kernels.cpu.simd import F32_COLUMNS, get_float, prefetch, put_float, transpose_16, widen_row

LARGEST = np.float32(127.0)


def has_scales(side: Any) -> bool:
    """Whether numbers of 8 bits are stored."""
    raise NotImplementedError("compiled code only")


def numbers_of(side: Any) -> int:
    """How many numbers a row of a head has."""
    raise NotImplementedError("compiled code only")


def store_row(side: Any, block: int, offset: int, head: int, rows: Any) -> None:
    """Store rows[head] into its place."""
    raise NotImplementedError("compiled code only")


def load_scales(
    side: Any, tables: Any, sequence: int, base: int, count: int, kv_head: int, target: Any, line: int
) -> None:
    """Load the scales of `count` positions into a line of `target`, if there are any."""
    raise NotImplementedError("compiled code only")


@overload(has_scales, strict=False)
def _has_scales(side: Any) -> Any:
    scaled = side.dtype == types.int8
    return lambda side: scaled


@overload(numbers_of, strict=False)
def _numbers_of(side: Any) -> Any:
    if side.dtype == types.int8:
        return lambda side: side.shape[3] - SCALE_BYTES
    return lambda side: side.shape[3]


@overload(store_row, strict=False)
def _store_row(side: Any, block: Any, offset: Any, head: Any, rows: Any) -> Any:
    store = _store_rounded if side.dtype == types.int8 else _store_narrowed
    return lambda side, block, offset, head, rows: store(side, block, offset, head, rows)


@overload(load_scales, strict=False)
def _load_scales(
    side: Any, tables: Any, sequence: Any, base: Any, count: Any, kv_head: Any, target: Any, line: Any
) -> Any:
    if side.dtype != types.int8:
        return lambda side, tables, sequence, base, count, kv_head, target, line: None
    return lambda side, tables, sequence, base, count, kv_head, target, line: _read_scales(
        side, tables, sequence, base, count, kv_head, target, line
    )


@compiled()
def place_of(tables: Any, sequence: int, position: int, block_size: int) -> Any:
    """The block and the slot of a position. Divides 32-bit numbers without a sign, which takes least."""
    index = np.uint32(position) // np.uint32(block_size)
    return tables[sequence, index], position - np.int64(index) * block_size


@compiled(FAST)
def _store_narrowed(side: Any, block: int, offset: int, head: int, rows: Any) -> None:
    like = side[0, 0, 0, 0]
    for i in range(rows.shape[1]):
        side[block, offset, head, i] = narrow(rows[head, i], like)


@compiled()  # exact division: as `narrowed` rounds in torch
def _store_rounded(side: Any, block: int, offset: int, head: int, rows: Any) -> None:
    """Quantize to -127..127."""
    scale, divisor = scale_of(rows, head, LARGEST)
    for i in range(rows.shape[1]):
        side[block, offset, head, i] = np.int8(np.int32(nearest(rows[head, i] / divisor)))
    row = (block * side.shape[1] + offset) * side.shape[2] + head
    put_float(side.ctypes.data + (row + 1) * side.shape[3] - SCALE_BYTES, scale)


@compiled()
def _read_scales(
    side: Any, tables: Any, sequence: int, base: int, count: int, kv_head: int, target: Any, line: int
) -> None:
    block_size, stride = side.shape[1], side.shape[2] * side.shape[3]
    j = 0
    while j < count:
        block, slot = place_of(tables, sequence, base + j, block_size)
        run = min(block_size - slot, count - j)
        start = side.ctypes.data + (block * block_size + slot) * stride + (kv_head + 1) * side.shape[3] - SCALE_BYTES
        for at in range(run):
            target[line, j + at] = get_float(start + at * stride)
        j += run


@compiled(FAST)
def load_rows(
    side: Any, tables: Any, sequence: int, base: int, count: int, kv_head: int, width: int, target: Any
) -> None:
    """Load `count` positions, the first `width` numbers of each, into target [positions, width]."""
    like, size, block_size = side[0, 0, 0, 0], side.itemsize, side.shape[1]
    whole = width // 16 * 16
    j = 0
    while j < count:
        block, slot = place_of(tables, sequence, base + j, block_size)
        for at in range(slot, min(block_size, slot + count - j)):
            source = side.ctypes.data + (((block * block_size + at) * side.shape[2] + kv_head) * side.shape[3]) * size
            widen_row(target.ctypes.data + j * target.shape[1] * 4, source, whole, like)
            for i in range(whole, width):
                target[j, i] = widen(side[block, at, kv_head, i])
            j += 1


@compiled(FAST)
def load_columns(side: Any, tables: Any, sequence: int, base: int, count: int, kv_head: int, target: Any) -> None:
    """Like `load_rows` with all numbers of a head, transposed: target [head_dim, positions]."""
    like, size, head_dim, block_size = side[0, 0, 0, 0], side.itemsize, numbers_of(side), side.shape[1]
    whole, stride = head_dim // 16 * 16, side.shape[2] * side.shape[3]
    j = 0
    while j < count:
        block, slot = place_of(tables, sequence, base + j, block_size)
        run = min(block_size - slot, count - j)
        start = side.ctypes.data + ((block * block_size + slot) * stride + kv_head * side.shape[3]) * size
        squares = run // 16 * 16
        for at in range(0, squares, 16):
            for i in range(0, whole, 16):
                to = target.ctypes.data + (i * target.shape[1] + j + at) * 4
                transpose_16(to, target.shape[1], start + (at * stride + i) * size, stride, like)
        for at in range(run):
            for i in range(whole if at < squares else 0, head_dim):
                target[i, j + at] = widen(side[block, slot + at, kv_head, i])
        j += run


@compiled()
def distance_ahead(side: Any, tables: Any, row: int, next_sequence: int, next_position: int, next_end: int) -> Any:
    """The bytes from a row of the cache to that of the next position to prefetch; 0 if it is not before `next_end`.

    Kernels prefetch what is so far ahead of each line that they read: prefetches as even as that leave no thread
    waiting. The hardware prefetcher cannot follow block tables."""
    if next_position >= next_end:
        return 0
    block, slot = place_of(tables, next_sequence, next_position, side.shape[1])
    return (block * side.shape[1] + slot - row) * side.shape[2] * side.shape[3] * side.itemsize


@compiled()
def fetch_tile(side: Any, tables: Any, sequence: int, base: int, end: int, share: int, shares: int) -> None:
    """Prefetch a share of each block of the tile at `base`, as far as before `end`. Each KV head has its share."""
    block_size, row = side.shape[1], side.shape[2] * side.shape[3] * side.itemsize
    for position in range(base, min(base + F32_COLUMNS, end), block_size):
        slot = position % block_size
        start = side.ctypes.data + (tables[sequence, position // block_size] * block_size + slot) * row
        lines = (min(block_size - slot, end - position) * row + 63) // 64
        for line in range(lines * share // shares, lines * (share + 1) // shares):
            prefetch(start + 64 * line)
