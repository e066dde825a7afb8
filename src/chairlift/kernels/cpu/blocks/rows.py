"""Activations in 8-bit integers, with a scale for every 32 of a row."""

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
from chairlift.kernels.cpu.scalar_math import compiled
from chairlift.kernels.cpu.simd import F32, I8, I32, I64, load, reduce, splat, store

DEPTH_UNIT = 256  # rows are padded to whole units of all kinds of blocks
SPAN_BYTES = 16  # of what is known of a span: its scale, scale * sum, and the sums of both halves


class BlockRows(NamedTuple):
    numbers: np.ndarray  # [rows, depth, padded] int8
    spans: np.ndarray  # [rows, depth / 32, 4] 32-bit words: see SPAN_BYTES

    @classmethod
    def empty(cls, rows: int, depth: int) -> BlockRows:
        padded = -(-depth // DEPTH_UNIT) * DEPTH_UNIT
        numbers, spans = aligned((rows, padded), np.int8), aligned((rows, padded // COLUMNS, 4), np.int32)
        numbers[:] = 0
        spans[:] = 0
        return cls(numbers, spans)


@intrinsic
def _round_span(_: Any, values: Any, numbers: Any, span: Any) -> Any:
    """Quantize 32 float32 numbers to -127..127. A NaN makes the scale NaN."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        values, numbers, span = args
        floats, words = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
        parts = [load(b, b.add(values, I64(64 * part)), floats, 4) for part in range(2)]
        sizes = [b.and_(b.bitcast(part, words), ir.Constant(words, [0x7FFFFFFF] * 16)) for part in parts]
        highest = reduce(b, "smax", b.select(b.icmp_signed(">", *sizes), *sizes))
        largest = b.bitcast(highest, F32)  # positive floats compare like integers
        none = b.icmp_signed("==", highest, I32(0))
        factor = splat(b, b.select(none, F32(0), b.fdiv(F32(127), largest)), 16)
        rint = cgutils.get_or_insert_function(b.module, ir.FunctionType(floats, [floats]), "llvm.rint.v16f32")
        whole = [b.fptosi(b.call(rint, [b.fmul(part, factor)]), words) for part in parts]
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
    whole = values.shape[0] // COLUMNS
    numbers = rows.numbers.ctypes.data + row * rows.numbers.shape[1]
    spans = rows.spans.ctypes.data + row * rows.spans.shape[1] * SPAN_BYTES
    for span in range(whole):
        _round_span(values.ctypes.data + span * COLUMNS * 4, numbers + span * COLUMNS, spans + span * SPAN_BYTES)
    if whole * COLUMNS < values.shape[0]:  # pad the last span
        last = np.zeros(COLUMNS, dtype=np.float32)
        last[: values.shape[0] - whole * COLUMNS] = values[whole * COLUMNS :]
        _round_span(last.ctypes.data, numbers + whole * COLUMNS, spans + whole * SPAN_BYTES)
