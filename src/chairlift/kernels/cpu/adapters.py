"""Low-rank terms of products, row by row: each row of a step may have its own adapters, or several with weights.

A row is shrunk to the rank where its numbers are in the cache anyway, before they are rounded for the product, and
expanded behind the product. So a row's result depends on nothing else in the step. The matrices of each adapter lie in
memory of their own, which a table has by adapter slot and product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from chairlift.kernels.adapter_table import FIRST, IS_HALF, NUM_PARTS, PART_RANK, PARTS, RANK, SIZE, WIDTH, A, B
from chairlift.kernels.cpu.compiling import FAST, compiled, compiled_and_kept, widen
from chairlift.kernels.cpu.threads import barrier, claim


class Terms(NamedTuple):
    """The adapters in memory, and those of the T rows of a step: at most K each, in front. No rows: none has any."""

    table: np.ndarray  # [slots, products, WIDTH] int64
    slots: np.ndarray  # [T, K] int32: adapter slots, -1: none
    weights: np.ndarray  # [T, K] float32
    shrunk: np.ndarray  # [T, K, most ranks of a product] float32: between the product's both sides


NO_TERMS = Terms(
    np.empty((0, 0, WIDTH), dtype=np.int64),
    np.empty((0, 0), dtype=np.int32),
    np.empty((0, 0), dtype=np.float32),
    np.empty((0, 0, 0), dtype=np.float32),
)


def _pointer_to(word: types.Type) -> Any:
    @intrinsic
    def pointer(_: Any, address: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(word)(types.int64), generate

    return pointer


_floats, _halves = _pointer_to(types.float32), _pointer_to(types.uint16)


@compiled(FAST)
def _shrink(values: Any, matrix: Any, weight: Any, out: Any) -> None:
    """out [rank] = weight * matrix [rank, depth] times values [depth]."""
    rank, depth = matrix.shape
    whole = rank // 4 * 4
    for r in range(0, whole, 4):
        a0, a1, a2, a3 = matrix[r], matrix[r + 1], matrix[r + 2], matrix[r + 3]
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for i in range(depth):
            value = values[i]
            s0 += value * widen(a0[i])
            s1 += value * widen(a1[i])
            s2 += value * widen(a2[i])
            s3 += value * widen(a3[i])
        out[r], out[r + 1], out[r + 2], out[r + 3] = weight * s0, weight * s1, weight * s2, weight * s3
    for r in range(whole, rank):
        row, total = matrix[r], np.float32(0.0)
        for i in range(depth):
            total += values[i] * widen(row[i])
        out[r] = weight * total


@compiled(FAST)
def _expand(shrunk: Any, matrix: Any, out: Any) -> None:
    """out [size] += shrunk [rank] times matrix [rank, size]."""
    rank, size = matrix.shape
    whole = rank // 4 * 4
    for r in range(0, whole, 4):
        b0, b1, b2, b3 = matrix[r], matrix[r + 1], matrix[r + 2], matrix[r + 3]
        s0, s1, s2, s3 = shrunk[r], shrunk[r + 1], shrunk[r + 2], shrunk[r + 3]
        for i in range(size):
            out[i] += s0 * widen(b0[i]) + s1 * widen(b1[i]) + s2 * widen(b2[i]) + s3 * widen(b3[i])
    for r in range(whole, rank):
        row, scale = matrix[r], shrunk[r]
        for i in range(size):
            out[i] += scale * widen(row[i])


@compiled(FAST)
def shrink(terms: Terms, row: int, product: int, values: Any) -> None:
    """Multiply the input [depth] of a product's row by the first matrices of the row's adapters."""
    if terms.slots.shape[0] == 0:
        return
    for k in range(terms.slots.shape[1]):
        slot = terms.slots[row, k]
        if slot < 0:
            return
        entry = terms.table[slot, product]
        shape, weight, out = (entry[RANK], values.shape[0]), terms.weights[row, k], terms.shrunk[row, k]
        if entry[RANK] > 0 and entry[IS_HALF] != 0:
            _shrink(values, carray(_halves(entry[A]), shape), weight, out)
        elif entry[RANK] > 0:
            _shrink(values, carray(_floats(entry[A]), shape), weight, out)


@compiled(FAST)
def expand(terms: Terms, row: int, product: int, out: Any) -> None:
    """Add the terms of the row's adapters to its product [channels]; `shrink` came before."""
    for k in range(terms.slots.shape[1]):
        slot = terms.slots[row, k]
        if slot < 0:
            return
        entry, start = terms.table[slot, product], 0
        for part in range(entry[NUM_PARTS]):
            numbers = entry[PARTS + 4 * part : PARTS + 4 * part + 4]
            first, shape = numbers[FIRST], (numbers[PART_RANK], numbers[SIZE])
            shrunk = terms.shrunk[row, k, start : start + numbers[PART_RANK]]
            target = out[first : first + numbers[SIZE]]
            if entry[IS_HALF] != 0:
                _expand(shrunk, carray(_halves(numbers[B]), shape), target)
            else:
                _expand(shrunk, carray(_floats(numbers[B]), shape), target)
            start += numbers[PART_RANK]


@compiled_and_kept(FAST)
def add_terms(shared: Any, members: int, terms: Terms, rows: Any, product: int, x: Any, out: Any) -> None:
    """Add the terms of a product to out [R, channels], whose inputs are x [R, depth]; `rows` [R]: those of the step."""
    while True:
        place = claim(shared, 1)
        if place >= x.shape[0]:
            break
        shrink(terms, rows[place], product, x[place])
        expand(terms, rows[place], product, out[place])
    barrier(shared, members)
