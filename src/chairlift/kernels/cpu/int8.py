"""Matrix products with 8-bit weights.

Weights are quantized once, with one scale per output channel. Activations are quantized at every step, with one scale
per SPAN elements of a row: a row has a few outliers, and a single scale would leave few levels for all other elements.
Scales are per row, so a request's results do not depend on the rest of its batch. Integer products are exact and spans
are added in order, so results do not depend on the tiling either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.cpu.compiling import FAST, compiled, compiled_and_kept, nearest
from chairlift.kernels.cpu.simd import (
    GROUP,
    OFFSET,
    PANEL,
    SPAN,
    find_instruction_set,
    int8_tile,
    prefetch_to_write,
    span_rounder,
    tile_finisher,
)
from chairlift.kernels.cpu.threads import claim
from chairlift.loading.weight_cache.cache_file import PackedArray, replacing

ISA = find_instruction_set()
ROWS, PANELS = ISA.rows, ISA.panels
COLUMNS = PANELS * PANEL  # A tile has this many.
ROW_TYPE = np.int16 if ISA.wide_rows else np.int8
ROW_BYTES = np.dtype(ROW_TYPE).itemsize
ROWS_AT_ONCE = 192  # rows per claimed work item: they fit into the L2 cache
LARGEST = np.float32(127.0)

_round_span = span_rounder(ISA.wide_rows)
_finish = tile_finisher(COLUMNS)
_tile_all, _tile_4, _tile_3, _tile_2, _tile_1 = (int8_tile(ISA, rows) for rows in (ROWS, 4, 3, 2, 1))
# A few rows form one tile, so that every weight is read once; more rows use smaller tiles.
FEW = ISA.few_rows
_tile_8, _tile_7, _tile_6, _tile_5 = (int8_tile(ISA, min(rows, FEW)) for rows in (8, 7, 6, 5))


class PackedWeight(NamedTuple):
    """A quantized weight: output channels in panels of PANEL, padded with zeros to whole tiles.

    All arrays may have a leading axis of layers.
    """

    numbers: np.ndarray  # [panels, depth / GROUP, PANEL, GROUP] uint8
    scales: np.ndarray  # [panels * PANEL] float32

    def layer(self, index: int) -> PackedWeight:
        return PackedWeight(self.numbers[index], self.scales[index])

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    @classmethod
    def empty(cls, layers: int, channels: int, depth: int) -> PackedWeight:
        panels = -(-channels // COLUMNS) * PANELS
        groups = -(-depth // SPAN) * (SPAN // GROUP)
        numbers = aligned((layers, panels, groups, PANEL, GROUP))
        return cls(numbers, np.zeros((layers, panels * PANEL), dtype=np.float32))

    def arrays(self) -> list[PackedArray]:
        return [PackedArray("numbers", self.numbers), PackedArray("scales", self.scales)]

    def replaced(self, arrays: Sequence[PackedArray]) -> PackedWeight:
        """The same weight in other arrays; raises ValueError if they have another form."""
        return PackedWeight(*replacing(self.arrays(), arrays))

    def fill(self, weight: np.ndarray) -> None:
        """Quantize and pack `weight` [channels, depth] float32."""
        _pack(np.ascontiguousarray(weight), self.numbers, self.scales)


@compiled_and_kept()
def _pack(weight: Any, numbers: Any, scales: Any) -> None:
    channels, depth = weight.shape
    for channel in range(scales.shape[0]):
        panel, place = channel // PANEL, channel % PANEL
        largest = np.float32(0.0)
        if channel < channels:
            for i in range(depth):
                largest = max(largest, abs(weight[channel, i]))
        scale = largest / LARGEST
        scales[channel] = scale
        for group in range(numbers.shape[1]):
            for i in range(GROUP):
                number = np.float32(0.0)
                if scale > 0 and group * GROUP + i < depth:
                    number = nearest(weight[channel, group * GROUP + i] / scale)
                numbers[panel, group, place, i] = np.uint8(np.int32(number) + OFFSET)


class Rows(NamedTuple):
    """Quantized activations."""

    numbers: np.ndarray  # [rows, spans * SPAN] ROW_TYPE, padded with zeros
    scales: np.ndarray  # [rows, spans] float32
    starts: np.ndarray  # [rows, spans] int32: corrects for the unsigned offset of the weights

    @classmethod
    def empty(cls, rows: int, depth: int) -> Rows:
        spans = -(-depth // SPAN)
        numbers = np.zeros((rows, spans * SPAN), dtype=ROW_TYPE)
        return cls(numbers, np.empty((rows, spans), dtype=np.float32), np.empty((rows, spans), dtype=np.int32))


@compiled()
def round_row(values: Any, rows: Rows, row: int) -> None:
    """Quantize `values` [depth] float32 into a row. A NaN makes all products of the row NaN."""
    spans, whole = rows.scales.shape[1], values.shape[0] // SPAN
    numbers = rows.numbers.ctypes.data + row * spans * SPAN * ROW_BYTES
    scales, starts = rows.scales.ctypes.data + row * spans * 4, rows.starts.ctypes.data + row * spans * 4
    for span in range(whole):
        source, to = values.ctypes.data + span * SPAN * 4, numbers + span * SPAN * ROW_BYTES
        _round_span(source, to, scales + span * 4, starts + span * 4)
    if whole < spans:  # pad the last span
        last = np.zeros(SPAN, dtype=np.float32)
        last[: values.shape[0] - whole * SPAN] = values[whole * SPAN :]
        _round_span(last.ctypes.data, numbers + whole * SPAN * ROW_BYTES, scales + whole * 4, starts + whole * 4)


@compiled(FAST)
def multiply(shared: Any, rows: Rows, count: int, weight: PackedWeight, bias: Any, adding: bool, out: Any) -> None:
    """Compute out [count, channels] = rows times weight + bias (empty: none), or add that to `out`.

    All threads of the team call this, with a `barrier` before and after.
    """
    tiles = weight.numbers.shape[0] // PANELS
    at_once = max(1, tiles // 16)
    claims = -(-tiles // at_once)
    blocks = -(-count // ROWS_AT_ONCE)
    room = np.empty(FEW * COLUMNS + 16, dtype=np.float32)
    start = -room.ctypes.data % 64 // 4  # align to a cache line: sums are stored and loaded once per span
    sums = room[start : start + FEW * COLUMNS].reshape(FEW, COLUMNS)
    while True:
        piece = claim(shared, 1)
        if piece >= claims * blocks:
            return
        first, begin = piece % claims * at_once, piece // claims * ROWS_AT_ONCE
        end = min(begin + ROWS_AT_ONCE, count)
        for tile in range(first, min(first + at_once, tiles)):
            row = begin
            while row < end:
                _prefetch_target(out, row, min(FEW if count <= FEW else ROWS, end - row), tile * COLUMNS)
                done = _one_tile(sums, rows, row, end - row, weight, tile)
                _scale(sums, row, done, weight.scales, tile * COLUMNS, bias, adding, out)
                row += done


@compiled()
def _prefetch_target(out: Any, row: int, count: int, first: int) -> None:
    """Prefetch the cache lines that a tile will be written to."""
    for i in range(count):
        start = out.ctypes.data + ((row + i) * out.shape[1] + first) * 4
        for line in range(0, COLUMNS * 4, 64):
            prefetch_to_write(start + line)


@compiled()
def _one_tile(sums: Any, rows: Rows, row: int, left: int, weight: PackedWeight, tile: int) -> int:
    """Compute a tile of at most `left` rows; return the number of rows."""
    spans, to = rows.scales.shape[1], sums.ctypes.data
    stride, panel_stride = rows.numbers.shape[1] * ROW_BYTES, rows.numbers.shape[1] * PANEL
    source = rows.numbers.ctypes.data + row * stride
    scales, starts = rows.scales.ctypes.data + row * spans * 4, rows.starts.ctypes.data + row * spans * 4
    panel = weight.numbers.ctypes.data + tile * PANELS * panel_stride
    if 4 < left <= FEW and row == 0:
        if left == 5:
            _tile_5(to, source, stride, scales, starts, spans, panel, panel_stride)
        elif left == 6:
            _tile_6(to, source, stride, scales, starts, spans, panel, panel_stride)
        elif left == 7:
            _tile_7(to, source, stride, scales, starts, spans, panel, panel_stride)
        else:
            _tile_8(to, source, stride, scales, starts, spans, panel, panel_stride)
        return left
    if left >= ROWS:
        _tile_all(to, source, stride, scales, starts, spans, panel, panel_stride)
        return ROWS
    if left >= 4:
        _tile_4(to, source, stride, scales, starts, spans, panel, panel_stride)
        return 4
    if left == 3:
        _tile_3(to, source, stride, scales, starts, spans, panel, panel_stride)
    elif left == 2:
        _tile_2(to, source, stride, scales, starts, spans, panel, panel_stride)
    else:
        _tile_1(to, source, stride, scales, starts, spans, panel, panel_stride)
    return left


@compiled(FAST)
def _scale(sums: Any, row: int, done: int, scales: Any, first: int, bias: Any, adding: bool, out: Any) -> None:
    columns = min(COLUMNS, out.shape[1] - first)
    if columns == COLUMNS:
        target = out.ctypes.data + (row * out.shape[1] + first) * 4
        _finish(target, out.shape[1] * 4, done, sums.ctypes.data, scales.ctypes.data + first * 4, adding)
    else:
        for i in range(done):
            for j in range(columns):
                before = out[row + i, first + j] if adding else np.float32(0.0)
                out[row + i, first + j] = before + sums[i, j] * scales[first + j]
    if bias.shape[0] > 0:
        for i in range(done):
            for j in range(columns):
                out[row + i, first + j] += bias[first + j]
