"""Products with 8-bit weights.

A weight is rounded once, each of its output channels with a scale of its own. Activations are rounded at every step,
each row with a scale of its own: so a request's numbers do not depend on who shares its batch. Products of integers
are exact, hence neither do they depend on how rows are grouped into tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu_math import FAST, bits, compiled, from_bits, nearest
from chairlift.kernels.cpu_simd import GROUP, PANEL, find_instruction_set, int8_tile
from chairlift.kernels.cpu_threads import claim

ISA = find_instruction_set()
ROWS, PANELS = ISA.rows, ISA.panels
COLUMNS = PANELS * PANEL  # of a tile
ROW_TYPE = np.int16 if ISA.wide_rows else np.int8
ROW_BYTES = np.dtype(ROW_TYPE).itemsize
ROWS_AT_ONCE = 192  # rows that one claim of work goes through: they stay in the second-level cache
OFFSET = 128  # weights are stored as unsigned numbers: the instructions want it so
LARGEST = np.float32(127.0)

_tile_all, _tile_4, _tile_2, _tile_1 = (int8_tile(ISA, rows) for rows in (ROWS, 4, 2, 1))


class PackedWeight(NamedTuple):
    """Columns are the output channels, in panels of PANEL; channels that fill up the last tile are zero.

    A leading axis may count layers.
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
        groups = -(-depth // GROUP)
        numbers = _aligned((layers, panels, groups, PANEL, GROUP))
        return cls(numbers, np.zeros((layers, panels * PANEL), dtype=np.float32))

    def fill(self, weight: np.ndarray) -> None:
        """Round `weight` [channels, depth] float32, some channels at a time so that no large copy is made."""
        depth = weight.shape[1]
        panels, groups = self.numbers.shape[0], self.numbers.shape[1]
        for first in range(0, panels * PANEL, 64 * PANEL):
            part = weight[first : first + 64 * PANEL]
            rows = min(64 * PANEL, panels * PANEL - first)
            padded = np.zeros((rows, groups * GROUP), dtype=np.float32)
            padded[: len(part), :depth] = part
            scales = np.abs(padded).max(axis=1) / LARGEST
            padded /= np.where(scales > 0, scales, 1)[:, None]
            numbers = (np.rint(padded) + OFFSET).astype(np.uint8)
            where = slice(first // PANEL, (first + rows) // PANEL)
            self.numbers[where] = numbers.reshape(-1, PANEL, groups, GROUP).transpose(0, 2, 1, 3)
            self.scales[first : first + rows] = scales


class Rows(NamedTuple):
    """Rounded activations."""

    numbers: np.ndarray  # [rows, depth] ROW_TYPE, filled up with zeros to a multiple of GROUP
    scales: np.ndarray  # [rows] float32
    sums: np.ndarray  # [rows] int32: of the numbers

    @classmethod
    def empty(cls, rows: int, depth: int) -> Rows:
        numbers = np.zeros((rows, -(-depth // GROUP) * GROUP), dtype=ROW_TYPE)
        return cls(numbers, np.empty(rows, dtype=np.float32), np.empty(rows, dtype=np.int32))


@compiled(FAST)
def round_row(values: Any, rows: Rows, row: int) -> None:
    """Round `values` [depth] float32 into a row. What is not a number makes the whole row so."""
    highest = np.int32(0)
    for i in range(values.shape[0]):
        highest = max(highest, bits(values[i]) & np.int32(0x7FFFFFFF))  # positive floats compare like integers
    largest = from_bits(highest)
    factor = LARGEST / largest if highest > 0 else np.float32(0.0)
    total = np.int32(0)
    for i in range(values.shape[0]):
        number = np.int32(nearest(values[i] * factor))
        rows.numbers[row, i] = number
        total += number
    rows.sums[row] = total
    finite = highest < np.int32(0x7F800000)
    rows.scales[row] = largest / LARGEST if finite else np.float32(np.nan)


@compiled(FAST)
def multiply(shared: Any, rows: Rows, count: int, weight: PackedWeight, bias: Any, adding: bool, out: Any) -> None:
    """out [count, channels] = rows times weight + bias (an empty one is none), or added to what is there.

    The team shares the work: call `meet` before and after.
    """
    depth, tiles = rows.numbers.shape[1], weight.numbers.shape[0] // PANELS
    at_once = max(1, tiles // 16)
    claims = -(-tiles // at_once)
    blocks = -(-count // ROWS_AT_ONCE)
    sums = np.empty((ROWS, COLUMNS), dtype=np.int32)
    while True:
        piece = claim(shared, 1)
        if piece >= claims * blocks:
            return
        first, begin = piece % claims * at_once, piece // claims * ROWS_AT_ONCE
        end = min(begin + ROWS_AT_ONCE, count)
        for tile in range(first, min(first + at_once, tiles)):
            row = begin
            while row < end:
                done = _one_tile(sums, rows, row, end - row, weight, tile, depth)
                _scale(sums, rows, row, done, weight.scales, tile * COLUMNS, bias, adding, out)
                row += done


@compiled()
def _one_tile(sums: Any, rows: Rows, row: int, left: int, weight: PackedWeight, tile: int, depth: int) -> int:
    """The products of as many of the `left` rows as there is a tile for; says how many."""
    to, stride = sums.ctypes.data, depth * ROW_BYTES
    source = rows.numbers.ctypes.data + row * stride
    panel_stride = depth * PANEL
    panel = weight.numbers.ctypes.data + tile * PANELS * panel_stride
    if left >= ROWS:
        _tile_all(to, source, stride, panel, panel_stride, depth // GROUP)
        return ROWS
    if left >= 4:
        _tile_4(to, source, stride, panel, panel_stride, depth // GROUP)
        return 4
    if left >= 2:
        _tile_2(to, source, stride, panel, panel_stride, depth // GROUP)
        return 2
    _tile_1(to, source, stride, panel, panel_stride, depth // GROUP)
    return 1


@compiled(FAST)
def _scale(
    sums: Any, rows: Rows, row: int, done: int, scales: Any, first: int, bias: Any, adding: bool, out: Any
) -> None:
    """Integers back to numbers: every product was off by OFFSET times its activation."""
    columns, biased = min(COLUMNS, out.shape[1] - first), bias.shape[0] > 0
    for i in range(done):
        scale, correction = rows.scales[row + i], np.int32(OFFSET) * rows.sums[row + i]
        if adding:
            for j in range(columns):
                out[row + i, first + j] += np.float32(sums[i, j] - correction) * (scale * scales[first + j])
        else:
            for j in range(columns):
                out[row + i, first + j] = np.float32(sums[i, j] - correction) * (scale * scales[first + j])
        if biased:
            for j in range(columns):
                out[row + i, first + j] += bias[first + j]


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Unsigned bytes that start on a cache line, as loads of whole panels like it."""
    size = int(np.prod(shape))
    memory = np.empty(size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)
