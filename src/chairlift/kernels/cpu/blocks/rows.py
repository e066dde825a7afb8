"""Activations in 8-bit integers, with a scale for every span of 32 of a row.

An outlier would take the precision of the others of its span. Outliers are set apart: they stay float32 numbers, which
are multiplied by their columns of a weight one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.cpu.blocks.kinds import COLUMNS
from chairlift.kernels.cpu.scalar_math import FAST, bits, compiled
from chairlift.kernels.cpu.simd import F32, I8, I32, I64, load, reduce, splat, store

DEPTH_UNIT = 256  # rows are padded to whole units of all kinds of blocks
SPAN_BYTES = 16  # It is known of a span: its scale, scale * sum, and the sums of both halves.
# An outlier is over this many times larger than the mean size of a row's numbers. With 10, 0.3% of the activations of
# the default model are outliers, and the rounding error of a token's loss is half as large as with none; 9 adds a fifth
# more of them and lowers it by 7% (docs/results/cpu.json). A row of n numbers has less than n / 10, whatever they are.
OUTLIER = 10
SMALLEST_OUTLIER = np.float32(1e-30)  # The mean may be rounded to zero if it is smaller.
FLOATS, WORDS = ir.VectorType(F32, 16), ir.VectorType(I32, 16)


class BlockRows(NamedTuple):
    numbers: np.ndarray  # [rows, depth, padded] int8
    spans: np.ndarray  # [rows, depth / 32, 4] 32-bit words: see SPAN_BYTES
    outliers: np.ndarray  # [rows, 1 + most, 2] 32-bit words: their number, then the column and the number of each

    @classmethod
    def empty(cls, rows: int, depth: int) -> BlockRows:
        padded = -(-depth // DEPTH_UNIT) * DEPTH_UNIT
        numbers, spans = aligned((rows, padded), np.int8), aligned((rows, padded // COLUMNS, 4), np.int32)
        numbers[:] = 0
        spans[:] = 0
        return cls(numbers, spans, np.zeros((rows, 2 + depth // OUTLIER, 2), dtype=np.int32))


@compiled(FAST)
def _mean_size(values: Any) -> Any:
    total = np.float32(0.0)
    for i in range(values.shape[0]):
        total += abs(values[i])
    return total / np.float32(values.shape[0])


@intrinsic
def _largest(_: Any, values: Any) -> Any:
    """The largest size of 32 float32 numbers, NaN if one is."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        return b.bitcast(_highest(b, [load(b, b.add(args[0], I64(64 * part)), FLOATS, 4) for part in range(2)]), F32)

    return types.float32(types.intp), generate


def _highest(b: ir.IRBuilder, parts: Sequence[ir.Value]) -> ir.Value:
    """The bits of the largest size of two vectors: positive floats compare like integers."""
    sizes = [b.and_(b.bitcast(part, WORDS), ir.Constant(WORDS, [0x7FFFFFFF] * 16)) for part in parts]
    return reduce(b, "smax", b.select(b.icmp_signed(">", *sizes), *sizes))


@intrinsic
def _round_span(_: Any, values: Any, numbers: Any, span: Any) -> Any:
    """Quantize 32 float32 numbers to -127..127. A NaN makes the scale NaN."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        values, numbers, span = args
        parts = [load(b, b.add(values, I64(64 * part)), FLOATS, 4) for part in range(2)]
        highest = _highest(b, parts)
        largest = b.bitcast(highest, F32)
        none = b.icmp_signed("==", highest, I32(0))
        factor = splat(b, b.select(none, F32(0), b.fdiv(F32(127), largest)), 16)
        rint = cgutils.get_or_insert_function(b.module, ir.FunctionType(FLOATS, [FLOATS]), "llvm.rint.v16f32")
        whole = [b.fptosi(b.call(rint, [b.fmul(part, factor)]), WORDS) for part in parts]
        finite = b.icmp_signed("<", highest, I32(0x7F800000))
        scale = b.select(finite, b.fdiv(largest, F32(127)), F32(float("nan")))
        totals = [reduce(b, "add", part) for part in whole]
        store(b, scale, span, 4)
        store(b, b.fmul(scale, b.sitofp(b.add(*totals), F32)), b.add(span, I64(4)), 4)
        for half, (part, total) in enumerate(zip(whole, totals, strict=True)):
            store(b, b.trunc(part, ir.VectorType(I8, 16)), b.add(numbers, I64(16 * half)), 1)
            store(b, total, b.add(span, I64(8 + 4 * half)), 4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@compiled()
def round_block_row(values: Any, rows: BlockRows, row: int) -> None:
    """Quantize `values` [depth] float32 into a row."""
    depth = values.shape[0]
    limit = np.float32(OUTLIER) * _mean_size(values)
    if limit < SMALLEST_OUTLIER:
        limit = SMALLEST_OUTLIER
    rest = np.empty(COLUMNS, dtype=np.float32)
    numbers = rows.numbers.ctypes.data + row * rows.numbers.shape[1]
    spans = rows.spans.ctypes.data + row * rows.spans.shape[1] * SPAN_BYTES
    outliers, found = rows.outliers[row], 0
    for first in range(0, depth, COLUMNS):
        source = values.ctypes.data + first * 4
        if first + COLUMNS > depth or _largest(source) > limit:
            found = _set_outliers_apart(values, first, limit, rest, outliers, found)
            source = rest.ctypes.data
        _round_span(source, numbers + first, spans + first // COLUMNS * SPAN_BYTES)
    outliers[0, 0] = found


@compiled()
def _set_outliers_apart(values: Any, first: int, limit: Any, rest: Any, outliers: Any, found: int) -> int:
    """Append the outliers of a span; `rest` gets the other numbers, padded with zeros."""
    rest[:] = 0
    for column in range(first, min(first + COLUMNS, values.shape[0])):
        value = values[column]
        if abs(value) > limit:
            found += 1
            outliers[found, 0], outliers[found, 1] = column, bits(value)
        else:
            rest[column - first] = value
    return found
