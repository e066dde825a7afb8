"""Stores keys and values; loads those of a sequence through its block table into tiles of float32, or prefetches them.

Keys and values of 8 bits have a scale for each token and head, a float32 behind the numbers of its row. Scales are not
applied to what is loaded, but to the scores and to the weights of the values.

With AVX-512 VNNI, scores of 16 keys of 8 bits are computed at a time. Keys are transposed in registers, as words of
four bytes, which one dot-product instruction multiplies with a query. For that, queries are split into a high and a low
part of 8 bits each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from chairlift.kernels.cpu.attention_work import SCALE_BYTES
from chairlift.kernels.cpu.compiling import FAST, compiled, narrow, nearest, scale_of, widen
from chairlift.kernels.cpu.simd import (
    F32,
    F32_COLUMNS,
    I8,
    I32,
    I64,
    VNNI_512,
    find_instruction_set,
    get_float,
    load,
    prefetch,
    prefetch_line,
    put_float,
    splat,
    store,
    transpose_16,
    transposed,
    widen_row,
)

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


TILE = 16  # keys
HAS_TILE = find_instruction_set() is VNNI_512
_LARGEST = np.float32(32512.0)  # 127 * 256: the high part is within -127..127
_MIDDLE = 128  # added to the high part, since one factor of the instruction is unsigned
_FLOATS, _WORDS, _BYTES = ir.VectorType(F32, TILE), ir.VectorType(I32, TILE), ir.VectorType(I8, 4 * TILE)


def has_score_tile(side: Any, queries: Any) -> bool:
    """Whether this machine has the instructions for keys of this type, whose rows must be whole registers."""
    raise NotImplementedError("compiled code only")


def split_query(side: Any, queries: Any, row: int, parts: Any, scales: Any) -> None:
    """Split queries[row] into parts[row], bytes of the high parts and then of the low parts;
    scales[row] is what the products are to be multiplied by."""
    raise NotImplementedError("compiled code only")


@overload(has_score_tile, strict=False)
def _has_score_tile(side: Any, queries: Any) -> Any:
    if side.dtype == types.int8 and HAS_TILE:
        return lambda side, queries: queries.shape[1] % 64 == 0
    return lambda side, queries: False


@overload(split_query, strict=False)
def _split_query(side: Any, queries: Any, row: Any, parts: Any, scales: Any) -> Any:
    if side.dtype == types.int8:
        return lambda side, queries, row, parts, scales: _split_to_bytes(queries, row, parts, scales)
    return lambda side, queries, row, parts, scales: None


@compiled()
def _split_to_bytes(queries: Any, row: int, parts: Any, scales: Any) -> None:
    width = queries.shape[1]
    scale, divisor = scale_of(queries, row, _LARGEST)
    for i in range(width):
        number = np.int32(nearest(queries[row, i] / divisor))
        parts[row, i] = np.uint8((number >> np.int32(8)) + np.int32(_MIDDLE))
        parts[row, width + i] = np.uint8(number & np.int32(255))
    scales[row] = scale


def score_keys(
    side: Any,
    target: int,
    target_stride: int,
    parts: Any,
    scales: Any,
    first: int,
    last: int,
    keys: int,
    ahead: int,
) -> None:
    """Write the scores of the queries [first, last), at most six, and the 16 keys at the address `keys` to the address
    `target`; the stride is in bytes. Prefetches what lies `ahead` bytes behind the keys."""
    raise NotImplementedError("compiled code only")


@overload(score_keys, strict=False)
def _score_keys(
    side: Any,
    target: Any,
    target_stride: Any,
    parts: Any,
    scales: Any,
    first: Any,
    last: Any,
    keys: Any,
    ahead: Any,
) -> Any:
    if side.dtype != types.int8 or not HAS_TILE:
        return lambda side, target, target_stride, parts, scales, first, last, keys, ahead: None
    tile_6, tile_5, tile_4, tile_3, tile_2, tile_1 = (_tile(rows) for rows in (6, 5, 4, 3, 2, 1))

    def score(
        side: Any,
        target: int,
        target_stride: int,
        parts: Any,
        scales: Any,
        first: int,
        last: int,
        keys: int,
        ahead: int,
    ) -> None:
        rows, stride, width = last - first, parts.shape[1], parts.shape[1] // 2
        query, scale = parts.ctypes.data + first * stride, scales.ctypes.data + 4 * first
        key_stride = side.shape[2] * side.shape[3]
        if rows == 6:
            tile_6(target, target_stride, query, stride, scale, keys, key_stride, width, ahead)
        elif rows == 5:
            tile_5(target, target_stride, query, stride, scale, keys, key_stride, width, ahead)
        elif rows == 4:
            tile_4(target, target_stride, query, stride, scale, keys, key_stride, width, ahead)
        elif rows == 3:
            tile_3(target, target_stride, query, stride, scale, keys, key_stride, width, ahead)
        elif rows == 2:
            tile_2(target, target_stride, query, stride, scale, keys, key_stride, width, ahead)
        else:
            tile_1(target, target_stride, query, stride, scale, keys, key_stride, width, ahead)

    return score


def _tile(rows: int) -> Any:
    """Build a function that writes the products of `rows` split queries with 16 keys of `width` numbers to target
    [rows, 16]. Strides are in bytes."""

    @intrinsic
    def tile(
        _: Any,
        target: Any,
        target_stride: Any,
        parts: Any,
        part_stride: Any,
        scales: Any,
        keys: Any,
        key_stride: Any,
        width: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
            target, target_stride, parts, part_stride, scales, keys, key_stride, width, ahead = args
            products = _products(b, rows, parts, part_stride, keys, key_stride, width, ahead)
            for row, product in enumerate(products):
                scale = splat(b, load(b, b.add(scales, I64(4 * row)), F32, 4), TILE)
                store(b, b.fmul(product, scale), b.add(target, b.mul(target_stride, I64(row))), 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return tile


def _words_of_keys(
    b: ir.IRBuilder, keys: ir.Value, stride: ir.Value, offset: ir.Value, ahead: ir.Value
) -> list[ir.Value]:
    """64 bytes of each of 16 keys, transposed: word i of all keys."""
    places = [b.add(b.add(keys, b.mul(stride, I64(key))), offset) for key in range(TILE)]
    rows = [load(b, place, _FLOATS, 1) for place in places]
    for place in places:
        prefetch_line(b, b.add(place, ahead))
    return transposed(b, rows)


def _products(
    b: ir.IRBuilder,
    rows: int,
    parts: ir.Value,
    part_stride: ir.Value,
    keys: ir.Value,
    key_stride: ir.Value,
    width: ir.Value,
    ahead: ir.Value,
) -> list[ir.Value]:
    """256 * high + low, of which the high part is stored plus 128: so 128 times the sum of each key is subtracted."""
    signature = ir.FunctionType(_WORDS, [_WORDS, _BYTES, _BYTES])
    dot = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx512.vpdpbusd.512")
    zero = ir.Constant(_WORDS, None)
    totals = [[cgutils.alloca_once_value(b, zero) for _ in range(2)] for _ in range(rows)]
    sums = cgutils.alloca_once_value(b, zero)
    for total in (sums, *(total for both in totals for total in both)):
        b.store(zero, total)
    ones = ir.Constant(_BYTES, [1] * (4 * TILE))
    with cgutils.for_range(b, b.udiv(width, I64(64))) as loop:
        offset = b.mul(loop.index, I64(64))
        for word, column in enumerate(_words_of_keys(b, keys, key_stride, offset, ahead)):
            four = b.bitcast(column, _BYTES)
            b.store(b.call(dot, [b.load(sums), ones, four]), sums)
            for row in range(rows):
                for part, total in enumerate(totals[row]):
                    at = b.add(b.add(offset, I64(4 * word)), b.mul(width, I64(part)))
                    address = b.add(b.add(parts, b.mul(part_stride, I64(row))), at)
                    query = b.bitcast(splat(b, load(b, address, I32, 1), TILE), _BYTES)
                    b.store(b.call(dot, [b.load(total), query, four]), total)
    middle = b.mul(b.load(sums), ir.Constant(_WORDS, [_MIDDLE] * TILE))
    found = []
    for high, low in totals:
        large = b.sitofp(b.sub(b.load(high), middle), _FLOATS)
        small = b.sitofp(b.load(low), _FLOATS)
        found.append(b.fadd(b.fmul(large, ir.Constant(_FLOATS, [256.0] * TILE)), small))
    return found
