"""Products with weights in panels of blocks. Kinds of blocks may differ between the panels of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.kernels.cpu.blocks.panels import KINDS, PANEL, BlockKind
from chairlift.kernels.cpu.blocks.rows import SPAN_BYTES, BlockRows, add_outliers, by_column, round_block_row
from chairlift.kernels.cpu.blocks.tile import block_tile
from chairlift.kernels.cpu.compiling import FAST, borrowed, compiled, compiled_and_kept, kept_c_function
from chairlift.kernels.cpu.simd import I64, VNNI_512, find_instruction_set
from chairlift.kernels.cpu.threads import barrier, claim

ISA = find_instruction_set()
MOST_ROWS = 8 if ISA is VNNI_512 else 3  # A tile has no more rows, since there are no registers for more sums.
ROWS_AT_ONCE = 192  # rows per claimed work item: they fit into the L2 cache
# Percent of the panels that the threads claim in one piece each: memory is read faster in long pieces. What is left is
# claimed in ever smaller ones, so that all finish together.
FIRST = 92
# Outliers read single columns, which probably ends the stream that the prefetchers of the CPU follow: for one row of
# 5632 columns it costs as much as a quarter of a panel. So they come after several panels, which fit into the L2 cache.
FEW_ROWS = 16  # Arithmetic takes most of the time if there are more.
L2_BYTES = 400_000
COLUMN_BYTES = 10  # A panel of Q4_K has this many bytes per column; no panel has more than 17.
ADDRESS, FUNCTION, UNITS = range(3)  # columns of `PanelWeight.panels`


class PanelWeight(NamedTuple):
    """Where the panels of a weight are; may have a leading axis of layers."""

    panels: np.ndarray  # [panels, 3] int64: address, address of the product function, number of units

    @classmethod
    def of(cls, kind: BlockKind, panels: np.ndarray, depth: int) -> PanelWeight:
        """Of panels [panels, bytes] of one kind, which must stay where they are."""
        units, function = -(-depth // kind.unit), product_function(kind.name).address
        addresses = panels.ctypes.data + np.arange(len(panels)) * panels.shape[1]
        return cls(np.stack([addresses, np.full_like(addresses, function), np.full_like(addresses, units)], axis=1))


@cache
def product_function(name: str) -> Any:
    """sums [count, PANEL] float32 = rows times one panel, as a C function: kernels call it by its address, so that a
    kernel need not contain the code of all kinds of blocks. With a count of 0, only outliers are multiplied."""
    kind, most = list(KINDS).index(name), MOST_ROWS

    def product(
        sums: int,
        rows: int,
        row_stride: int,
        spans: int,
        span_stride: int,
        columns: int,
        num_columns: int,
        outliers: int,
        units: int,
        panel: int,
        count: int,
    ) -> None:
        row = 0
        while count - row >= most:
            to, left, known = sums + row * PANEL * 4, rows + row * row_stride, spans + row * span_stride
            block_tile(kind, most, to, left, row_stride, known, span_stride, units, panel)
            row += most
        to, left, known = sums + row * PANEL * 4, rows + row * row_stride, spans + row * span_stride
        if most > 4 and count - row >= 4:
            block_tile(kind, 4, to, left, row_stride, known, span_stride, units, panel)
            row += 4
            to, left, known = sums + row * PANEL * 4, rows + row * row_stride, spans + row * span_stride
        if count - row == 3:
            block_tile(kind, 3, to, left, row_stride, known, span_stride, units, panel)
        elif count - row == 2:
            block_tile(kind, 2, to, left, row_stride, known, span_stride, units, panel)
        elif count - row == 1:
            block_tile(kind, 1, to, left, row_stride, known, span_stride, units, panel)
        add_outliers(kind, sums, columns, num_columns, outliers, panel)

    return kept_c_function(types.void(*[types.intp] * 11), product)


@intrinsic
def _call(_: Any, function: Any, arguments: Any) -> Any:
    """Call a product function by its address."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        numbers = cgutils.unpack_tuple(b, args[1])
        signature = ir.FunctionType(ir.VoidType(), [I64] * len(numbers))
        b.call(b.inttoptr(args[0], signature.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, len(arguments))), generate


@compiled(FAST)
def multiply_panels(
    shared: Any, members: int, rows: BlockRows, count: int, weight: PanelWeight, bias: Any, adding: bool, out: Any
) -> None:
    """Compute out [count, channels] = rows times weight + bias (empty: none), or add that to `out`.

    All threads of the team call this, with a `barrier` before and after.
    """
    panels, bias, out = borrowed(weight.panels), borrowed(bias), borrowed(out)
    claims = count_pieces(panels.shape[0], members)
    blocks = -(-count // ROWS_AT_ONCE)
    depth, span_stride = rows.numbers.shape[1], rows.spans.shape[1] * SPAN_BYTES
    most = max(1, L2_BYTES // (COLUMN_BYTES * depth)) if count <= FEW_ROWS else 1
    sums = np.empty((most * min(count, ROWS_AT_ONCE), PANEL), dtype=np.float32)  # never sliced: that is an atomic count
    outliers, ordered = by_column(rows, 0, 0), -1
    while True:
        piece = claim(shared, 1)
        if piece >= claims * blocks:
            return
        begin = piece // claims * ROWS_AT_ONCE
        size = min(ROWS_AT_ONCE, count - begin)
        left = rows.numbers.ctypes.data + begin * depth
        spans = rows.spans.ctypes.data + begin * span_stride
        if ordered != begin:
            outliers, ordered = by_column(rows, begin, size), begin
        first, last = piece_of(piece % claims, panels.shape[0], members)
        found = outliers.columns.shape[0]
        together = most if found > 0 else 1
        for start in range(first, last, together):
            end = min(start + together, last)
            for panel in range(start, end):
                to, where = sums.ctypes.data + (panel - start) * size * PANEL * 4, panels[panel]
                _call(
                    where[FUNCTION],
                    (to, left, depth, spans, span_stride, 0, 0, 0, where[UNITS], where[ADDRESS], size),
                )
            if found > 0:
                columns, numbers = outliers.columns.ctypes.data, outliers.outliers.ctypes.data
                for panel in range(start, end):
                    to, where = sums.ctypes.data + (panel - start) * size * PANEL * 4, panels[panel]
                    _call(
                        where[FUNCTION],
                        (to, 0, 0, 0, 0, columns, found, numbers, where[UNITS], where[ADDRESS], 0),
                    )
            for panel in range(start, end):
                _finish(sums, (panel - start) * size, size, begin, panel * PANEL, bias, adding, out)


@compiled()
def _end_of_piece(index: int, first: int, panels: int, members: int) -> int:
    """Where the piece `index` ends that begins at the panel `first`."""
    if index < members:
        return first + panels * FIRST // (100 * members)
    return first + max(1, (panels - first) // members)


@compiled()
def count_pieces(panels: int, members: int) -> int:
    count, first = 0, 0
    while first < panels:
        first = _end_of_piece(count, first, panels, members)
        count += 1
    return count


@compiled()
def piece_of(index: int, panels: int, members: int) -> Any:
    first, last = 0, 0
    for each in range(index + 1):
        first, last = last, _end_of_piece(each, last, panels, members)
    return first, last


@compiled(FAST)
def _finish(sums: Any, top: int, size: int, begin: int, first: int, bias: Any, adding: bool, out: Any) -> None:
    """Write `size` rows of sums from `top` to the rows from `begin` and the channels from `first`."""
    columns = min(PANEL, out.shape[1] - first)
    for i in range(size):
        target, row = out[begin + i, first : first + columns], sums[top + i]
        if adding:
            for j in range(columns):
                target[j] += row[j]
        else:
            for j in range(columns):
                target[j] = row[j]
        if bias.shape[0] > 0:
            for j in range(columns):
                target[j] += bias[first + j]


@compiled_and_kept(FAST)
def linear_panels(shared: Any, members: int, x: Any, rows: BlockRows, weight: PanelWeight, bias: Any, out: Any) -> None:
    """Compute out [T, channels] = x [T, depth] times weight, plus bias."""
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            break
        round_block_row(x[row], rows, row)
    barrier(shared, members)
    multiply_panels(shared, members, rows, x.shape[0], weight, bias, False, out)
    barrier(shared, members)
