"""Scores of 16 keys of 8 bits at a time, with AVX-512 VNNI.

Keys are transposed in registers, as words of four bytes, which one dot-product instruction multiplies with a query. For
that, queries are split into a high and a low part of 8 bits each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from chairlift.kernels.cpu.scalar_math import compiled, nearest, scale_of
from chairlift.kernels.cpu.simd import (
    F32,
    I8,
    I32,
    I64,
    VNNI_512,
    find_instruction_set,
    load,
    prefetch_line,
    splat,
    store,
    transposed,
)

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
