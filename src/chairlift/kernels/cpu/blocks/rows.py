"""Activations in 8-bit integers, with a scale for every span of 32 of a row, and the products of their outliers.

An outlier would take the precision of the others of its span. Outliers are set apart: they stay float32 numbers, which
are multiplied by their columns of a panel one by one. Outliers of different rows are mostly in the same columns, so
they are ordered by column, and each column is unpacked once for all rows. A row's products are added in the order of
columns, whatever other rows there are.
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
from chairlift.kernels.cpu.blocks.panels import COLUMNS, KINDS, PANEL, STEP, STEPS, BlockKind
from chairlift.kernels.cpu.blocks.tile import NUMBERS, WORDS, load_halves
from chairlift.kernels.cpu.compiling import FAST, bits, compiled
from chairlift.kernels.cpu.simd import F32, I8, I32, I64, load, multiply_add, reduce, splat, store

DEPTH_UNIT = 256  # rows are padded to whole units of all kinds of blocks
SPAN_BYTES = 16  # It is known of a span: its scale, scale * sum, and the sums of both halves.
# An outlier is over this many times larger than the mean size of a row's numbers. With 10, 0.3% of the activations of
# the default model are outliers, and the rounding error of a token's loss is half as large as with none; 9 adds a fifth
# more of them and lowers it by 7% (docs/results/cpu.json). A row of n numbers has less than n / 10, whatever they are.
OUTLIER = 10
SMALLEST_OUTLIER = np.float32(1e-30)  # The mean may be rounded to zero if it is smaller.
FLOATS = ir.VectorType(F32, 16)


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


class ColumnOutliers(NamedTuple):
    """The outliers of some rows, by column."""

    columns: np.ndarray  # [n, 2] int32: the column, and where its outliers end
    outliers: np.ndarray  # [n, 2] 32-bit words: row and number


@compiled()
def by_column(rows: BlockRows, begin: int, count: int) -> ColumnOutliers:
    """Order the outliers of `count` rows from `begin`."""
    total = 0
    for row in range(begin, begin + count):
        total += rows.outliers[row, 0, 0]
    columns, outliers = np.empty((total, 2), dtype=np.int32), np.empty((total, 2), dtype=np.int32)
    if total == 0:
        return ColumnOutliers(columns, outliers)
    spans = np.zeros(rows.spans.shape[1], dtype=np.int32)  # outliers in each span: most have none
    places = np.zeros(rows.numbers.shape[1], dtype=np.int32)  # outliers in each column, then where the next one goes
    for row in range(begin, begin + count):
        for each in rows.outliers[row, 1 : 1 + rows.outliers[row, 0, 0]]:
            spans[each[0] // COLUMNS] += 1
            places[each[0]] += 1
    found, end = 0, 0
    for span in range(spans.shape[0]):
        if spans[span] > 0:
            for column in range(span * COLUMNS, (span + 1) * COLUMNS):
                if places[column] > 0:
                    places[column], end = end, end + places[column]
                    columns[found, 0], columns[found, 1] = column, end
                    found += 1
    for row in range(begin, begin + count):
        for each in rows.outliers[row, 1 : 1 + rows.outliers[row, 0, 0]]:
            place = places[each[0]]
            outliers[place, 0], outliers[place, 1] = row - begin, each[1]
            places[each[0]] += 1
    return ColumnOutliers(columns[:found], outliers)


@intrinsic(prefer_literal=True)
def add_outliers(_: Any, kind: Any, sums: Any, columns: Any, count: Any, outliers: Any, panel: Any) -> Any:
    """Add to sums [rows, 16] the products of `ColumnOutliers` of `count` columns with one panel. `kind` (its place in
    KINDS) is a constant."""
    found = list(KINDS.values())[kind.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        _, sums, columns, count, outliers, panel = args
        first = cgutils.alloca_once_value(b, I64(0))
        b.store(I64(0), first)
        with cgutils.for_range(b, count) as loop:
            address = b.add(columns, b.mul(loop.index, I64(8)))
            column = _Column(b, found, panel, b.zext(load(b, address, I32, 4), I64)).values()
            end = b.zext(load(b, b.add(address, I64(4)), I32, 4), I64)
            with cgutils.for_range_slice(b, b.load(first), end, I64(1), I64) as (index, _index):
                outlier = b.add(outliers, b.mul(index, I64(8)))
                row = b.add(sums, b.mul(b.zext(load(b, outlier, I32, 4), I64), I64(4 * PANEL)))
                value = splat(b, load(b, b.add(outlier, I64(4)), F32, 4), PANEL)
                store(b, b.call(multiply_add(b, PANEL), [column, value, load(b, row, NUMBERS, 4)]), row, 4)
            b.store(end, first)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 5), generate


class _Column:
    """One column of a panel: a number for each channel."""

    def __init__(self, b: ir.IRBuilder, kind: BlockKind, panel: ir.Value, column: ir.Value) -> None:
        self.b, self.kind = b, kind
        self.unit = b.add(panel, b.mul(b.udiv(column, I64(kind.unit)), I64(kind.unit_bytes)))
        self.group = b.urem(b.udiv(column, I64(COLUMNS)), I64(kind.groups))
        self.place = b.urem(column, I64(COLUMNS))  # This is the column's place in its group.

    def values(self) -> ir.Value:
        b, kind = self.b, self.kind
        centred = b.sub(self._numbers(), ir.Constant(WORDS, [kind.offset] * PANEL))
        values = b.fmul(b.sitofp(centred, NUMBERS), self._scale(kind.scales_at, 0))
        return b.fadd(values, self._scale(kind.mins_at, 2 * PANEL)) if kind.has_min else values

    def _numbers(self) -> ir.Value:
        b, kind = self.b, self.kind
        group = b.add(b.add(self.unit, I64(kind.numbers_at)), b.mul(self.group, I64(kind.group_bytes)))
        if kind.bits == 8:
            return self._field(group, 8)
        low = self._field(group, 4)
        if kind.values is not None:
            return self._look_up(low)
        if kind.bits == 4:
            return low
        high = self._field(b.add(group, I64(64 * STEPS // 2)), kind.bits - 4)
        return b.or_(low, b.shl(high, ir.Constant(WORDS, [4] * PANEL)))

    def _field(self, address: ir.Value, bits: int) -> ir.Value:
        """The bits of the column from planes of 64 bytes, each of which is shared by as many steps as fit."""
        b, shared = self.b, 8 // bits
        step = b.udiv(self.place, I64(STEP))
        plane = b.add(address, b.mul(b.udiv(step, I64(shared)), I64(64)))
        byte, field = b.urem(self.place, I64(STEP)), b.urem(step, I64(shared))
        shift = b.trunc(b.add(b.mul(byte, I64(8)), b.mul(field, I64(bits))), I32)
        moved = b.lshr(load(b, plane, WORDS, 1), splat(b, shift, PANEL))
        return b.and_(moved, ir.Constant(WORDS, [2**bits - 1] * PANEL))

    def _look_up(self, numbers: ir.Value) -> ir.Value:
        b, values = self.b, self.kind.values
        assert values is not None
        found = ir.Constant(WORDS, [values[0]] * PANEL)
        for number, value in enumerate(values[1:], 1):
            same = b.icmp_unsigned("==", numbers, ir.Constant(WORDS, [number] * PANEL))
            found = b.select(same, ir.Constant(WORDS, [value] * PANEL), found)
        return found

    def _scale(self, at: int, factor_at: int) -> ir.Value:
        """The scale, or the minimum, of the column."""
        b, kind = self.b, self.kind
        part = b.mul(b.udiv(self.place, I64(kind.scale_columns)), I64(kind.part_bytes))
        address = b.add(b.add(self.unit, I64(at)), b.add(b.mul(self.group, I64(kind.scale_bytes)), part))
        if not kind.nested:
            return load_halves(b, address)
        small = load(b, address, ir.VectorType(I8, PANEL), 1)
        wide = b.sext(small, WORDS) if kind.signed_scales else b.zext(small, WORDS)
        return b.fmul(b.sitofp(wide, NUMBERS), load_halves(b, b.add(self.unit, I64(factor_at))))
