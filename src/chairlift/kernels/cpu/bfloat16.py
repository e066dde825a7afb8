"""Matrix products with weights in bfloat16: activations are rounded to bfloat16, sums are float32.

Every row is summed in the same order, whatever other rows there are.
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
from chairlift.kernels.cpu.blocks.product import count_pieces, piece_of
from chairlift.kernels.cpu.compiling import FAST, borrowed, compiled, compiled_and_kept, narrow
from chairlift.kernels.cpu.simd import (
    F32,
    HAS_BF16,
    I32,
    I64,
    LANES,
    PANEL,
    load,
    multiply_add,
    prefetch_line,
    splat,
    store,
)
from chairlift.kernels.cpu.threads import claim
from chairlift.loading.weight_cache.cache_file import PackedArray, replacing

PAIR = 2  # adjacent columns of one channel: as many as one dot-product instruction adds
PANELS, MOST_ROWS = (3, 8) if LANES == 16 else (1, 4)  # A tile has as many sums as there are registers for.
COLUMNS = PANELS * PANEL
ROWS_AT_ONCE = 96  # rows per claimed work item: they and a tile of weights fit into the L2 cache
_FLOATS, _WORDS = ir.VectorType(F32, PANEL), ir.VectorType(I32, PANEL)
_ZERO = np.uint16(0)


class HalfWeight(NamedTuple):
    """A weight in panels of PANEL output channels, padded with zeros to whole tiles; may have an axis of layers."""

    numbers: np.ndarray  # [panels, depth / PAIR, PANEL, PAIR] bfloat16 as uint16

    def layer(self, index: int) -> HalfWeight:
        return HalfWeight(self.numbers[index])

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    @classmethod
    def empty(cls, layers: int, channels: int, depth: int) -> HalfWeight:
        return cls(aligned((layers, -(-channels // COLUMNS) * PANELS, -(-depth // PAIR), PANEL, PAIR), np.uint16))

    def arrays(self) -> list[PackedArray]:
        return [PackedArray("bfloat16", self.numbers)]

    def replaced(self, arrays: Sequence[PackedArray]) -> HalfWeight:
        """The same weight in another array; raises ValueError if that has another form."""
        return HalfWeight(*replacing(self.arrays(), arrays))

    def fill(self, weight: np.ndarray) -> None:
        """Round and pack `weight` [channels, depth] float32."""
        _pack(np.ascontiguousarray(weight), self.numbers)


@compiled_and_kept()
def _pack(weight: Any, numbers: Any) -> None:
    channels, depth = weight.shape
    numbers[:] = 0
    for channel in range(channels):
        panel, place = channel // PANEL, channel % PANEL
        for i in range(depth):
            numbers[panel, i // PAIR, place, i % PAIR] = narrow(weight[channel, i], _ZERO)


class HalfRows(NamedTuple):
    """Activations rounded to bfloat16."""

    numbers: np.ndarray  # [rows, depth, padded to pairs with zeros] bfloat16 as uint16

    @classmethod
    def empty(cls, rows: int, depth: int) -> HalfRows:
        numbers = aligned((rows, -(-depth // PAIR) * PAIR), np.uint16)
        numbers[:] = 0
        return cls(numbers)


@compiled()
def round_half_row(values: Any, rows: HalfRows, row: int) -> None:
    """Round `values` [depth] float32 into a row."""
    target = rows.numbers[row]
    for i in range(values.shape[0]):
        target[i] = narrow(values[i], _ZERO)


class _BFloat(ir.Type):
    """LLVM's type of bfloat16 numbers, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_HALVES = ir.VectorType(_BFloat(), PAIR * PANEL)


def half_tile(rows: int, panels: int, *, by_pairs: bool) -> Any:
    """Build a function for sums [rows, panels * PANEL] float32 = left [rows, pairs] times adjacent panels, in bfloat16.
    Strides are in bytes. `by_pairs`: with the instruction for sums of two products, else in float32."""

    @intrinsic
    def tile(_: Any, sums: Any, left: Any, left_stride: Any, weight: Any, panel_stride: Any, pairs: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
            sums, left, left_stride, weight, panel_stride, pairs = args
            nothing = ir.Constant(_FLOATS, None)
            totals = [[cgutils.alloca_once_value(b, nothing) for _ in range(panels)] for _ in range(rows)]
            for total in (total for row_totals in totals for total in row_totals):
                b.store(nothing, total)
            lefts = [b.add(left, b.mul(left_stride, I64(row))) for row in range(rows)]
            starts = [b.add(weight, b.mul(panel_stride, I64(panel))) for panel in range(panels)]
            next_tile = b.mul(panel_stride, I64(panels))
            with cgutils.for_range(b, pairs) as loop:
                addresses = [b.add(start, b.mul(loop.index, I64(4 * PANEL))) for start in starts]
                columns = [load(b, address, _WORDS, 4) for address in addresses]
                if rows > 1:  # A prefetch would come too late with one row.
                    for address in addresses:
                        prefetch_line(b, b.add(address, next_tile))
                for start, row_totals in zip(lefts, totals, strict=True):
                    both = load(b, b.add(start, b.mul(loop.index, I64(4))), I32, 4)
                    for column, total in zip(columns, row_totals, strict=True):
                        add = _add_pairs if by_pairs else _add_widened
                        b.store(add(b, b.load(total), column, splat(b, both, PANEL)), total)
            for row, row_totals in enumerate(totals):
                for panel, total in enumerate(row_totals):
                    store(b, b.load(total), b.add(sums, I64(4 * PANEL * (row * panels + panel))), 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return tile


def _add_pairs(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    signature = ir.FunctionType(_FLOATS, [_FLOATS, _HALVES, _HALVES])
    dot = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512")
    return b.call(dot, [total, b.bitcast(x, _HALVES), b.bitcast(y, _HALVES)])


def _add_widened(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Add the products of the low halves of words, then those of the high halves."""
    fused = multiply_add(b, PANEL)
    low = [b.shl(words, ir.Constant(_WORDS, [16] * PANEL)) for words in (x, y)]
    high = [b.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * PANEL)) for words in (x, y)]
    for pair in (low, high):
        total = b.call(fused, [*(b.bitcast(words, _FLOATS) for words in pair), total])
    return total


_tile_most, _tile_4, _tile_2, _tile_1 = (half_tile(rows, PANELS, by_pairs=HAS_BF16) for rows in (MOST_ROWS, 4, 2, 1))


@compiled(FAST)
def multiply_halves(
    shared: Any, members: int, rows: HalfRows, count: int, weight: HalfWeight, bias: Any, adding: bool, out: Any
) -> None:
    """Compute out [count, channels] = rows times weight + bias (empty: none), or add that to `out`.

    All threads of the team call this, with a `barrier` before and after.
    """
    tiles = weight.numbers.shape[0] // PANELS
    claims, blocks = count_pieces(tiles, members), -(-count // ROWS_AT_ONCE)
    sums = np.empty((MOST_ROWS, COLUMNS), dtype=np.float32)
    numbers, weights, bias, out = borrowed(rows.numbers), borrowed(weight.numbers), borrowed(bias), borrowed(out)
    while True:
        piece = claim(shared, 1)
        if piece >= claims * blocks:
            return
        begin = piece // claims * ROWS_AT_ONCE
        end = min(begin + ROWS_AT_ONCE, count)
        first, last = piece_of(piece % claims, tiles, members)
        for tile in range(first, last):
            row = begin
            while row < end:
                done = _one_tile(sums, numbers, row, end - row, weights, tile)
                _finish(sums, row, done, tile * COLUMNS, bias, adding, out)
                row += done


@compiled()
def _one_tile(sums: Any, rows: Any, row: int, left: int, weight: Any, tile: int) -> int:
    """Compute a tile of at most `left` rows; return the number of rows."""
    pairs = weight.shape[1]
    stride, panel_stride = rows.shape[1] * 2, pairs * PANEL * PAIR * 2
    source, panel = rows.ctypes.data + row * stride, weight.ctypes.data + tile * PANELS * panel_stride
    to = sums.ctypes.data
    if left >= MOST_ROWS:
        _tile_most(to, source, stride, panel, panel_stride, pairs)
        return MOST_ROWS
    if left >= 4:
        _tile_4(to, source, stride, panel, panel_stride, pairs)
        return 4
    if left >= 2:
        _tile_2(to, source, stride, panel, panel_stride, pairs)
        return 2
    _tile_1(to, source, stride, panel, panel_stride, pairs)
    return 1


@compiled(FAST)
def _finish(sums: Any, row: int, done: int, first: int, bias: Any, adding: bool, out: Any) -> None:
    columns = min(COLUMNS, out.shape[1] - first)
    for i in range(done):
        target, found = out[row + i, first : first + columns], sums[i]
        if adding:
            for j in range(columns):
                target[j] += found[j]
        else:
            for j in range(columns):
                target[j] = found[j]
        if bias.shape[0] > 0:
            for j in range(columns):
                target[j] += bias[first + j]
