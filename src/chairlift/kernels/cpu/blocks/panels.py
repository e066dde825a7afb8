"""The block types of GGUF files; packs their blocks into panels, and unpacks single channels again.

A panel holds 16 output channels. Along the depth it is a sequence of units of 64 or 256 columns:

    factors | scales of all groups | minima of all groups | (padded to a line) numbers of group 0 | group 1 | ...

Scales come first because memory is read fastest in order. A group has 32 columns. Its numbers are in steps of four
columns, 64 bytes each: bytes 4c to 4c + 3 are the columns of channel c. Two steps share the nibbles of 64 bytes; what a
number has above four bits follows as bit planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.cpu.compiling import compiled, compiled_and_kept

PANEL = 16  # channels
STEP = 4  # columns of one dot-product instruction
COLUMNS = 32  # A group has this many.
STEPS = COLUMNS // STEP
LINE = 64  # bytes

# The values of the sixteen numbers of IQ4_NL and IQ4_XS, part of the file format.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A number n of a group stands for (n - offset) * scale + minimum."""

    name: str
    columns: int  # A block of the file has this many.
    num_bytes: int  # A block of the file has this many.
    bits: int
    offset: int = 0
    has_min: bool = False
    # Scales and minima are small integers, to be multiplied by factors per block; otherwise they are float16.
    nested: bool = False
    signed_scales: bool = False
    scale_columns: int = COLUMNS  # columns with a scale of their own
    values: tuple[int, ...] | None = None  # what numbers stand for before the offset is subtracted; None: themselves

    @property
    def unit(self) -> int:
        """Columns of a unit of a panel."""
        return 256 if self.nested else 64

    @property
    def groups(self) -> int:
        return self.unit // COLUMNS

    @property
    def group_bytes(self) -> int:
        """Bytes of the numbers of a group."""
        return PANEL * COLUMNS * self.bits // 8

    @property
    def part_bytes(self) -> int:
        """Bytes of the scales of as many columns as share one."""
        return PANEL * (1 if self.nested else 2)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a group, and of its minima."""
        return COLUMNS // self.scale_columns * self.part_bytes

    @property
    def scales_at(self) -> int:
        """Where the scales of a unit begin, after its factors."""
        return 2 * PANEL * self.nested * (1 + self.has_min)

    @property
    def mins_at(self) -> int:
        return self.scales_at + self.groups * self.scale_bytes

    @property
    def numbers_at(self) -> int:
        size = self.mins_at + self.groups * self.scale_bytes * self.has_min
        return -(-size // LINE) * LINE

    @property
    def unit_bytes(self) -> int:
        return self.numbers_at + self.groups * self.group_bytes

    def panel_bytes(self, depth: int) -> int:
        return -(-depth // self.unit) * self.unit_bytes


_IQ4 = tuple(value + 128 for value in IQ4_VALUES)
# Twice the values of the sixteen 4-bit floats (e2m1), so that they are integers; scales are halved.
E2M1_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E2M1 = tuple(value + 12 for value in E2M1_DOUBLES)

KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", 32, 18, 4, offset=8),
        BlockKind("Q4_1", 32, 20, 4, has_min=True),
        BlockKind("Q5_0", 32, 22, 5, offset=16),
        BlockKind("Q5_1", 32, 24, 5, has_min=True),
        BlockKind("Q8_0", 32, 34, 8, offset=128),
        BlockKind("IQ4_NL", 32, 18, 4, offset=128, values=_IQ4),
        # These two are of no file: MXFP4 and NVFP4 with scales in float16 (loading/stored_weight.py).
        BlockKind("E2M1_32", 32, 18, 4, offset=12, values=_E2M1),
        BlockKind("E2M1_16", 32, 20, 4, offset=12, values=_E2M1, scale_columns=16),
        BlockKind("Q4_K", 256, 144, 4, has_min=True, nested=True),
        BlockKind("Q5_K", 256, 176, 5, has_min=True, nested=True),
        BlockKind("Q6_K", 256, 210, 6, offset=32, nested=True, signed_scales=True, scale_columns=16),
        BlockKind("IQ4_XS", 256, 136, 4, offset=128, nested=True, signed_scales=True, values=_IQ4),
    )
}

_UNIT = 256  # the largest block of a file
_SIGN = 0x8000  # This is the sign's bit in a float16.


@compiled()
def _half(block: Any, at: int) -> Any:
    """The bits of a float16."""
    return np.uint16(block[at]) | np.uint16(block[at + 1]) << np.uint16(8)


# Each of these unpacks one block of a file: numbers, scales and minima by group, and the two factors.
@compiled()
def _read_small(block: Any, bits: int, parts: int, has_min: bool, numbers: Any, scales: Any, mins: Any) -> None:
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, E2M1_32 and E2M1_16."""
    for part in range(parts):
        scales[part] = _half(block, 2 * part)
    at = 2 * parts
    if has_min:
        mins[0] = _half(block, 2)
        at = 4
    if bits == 8:
        for i in range(COLUMNS):
            numbers[i] = block[at + i] ^ np.uint8(128)
        return
    low = at + 4 * (bits - 4)
    for i in range(COLUMNS // 2):
        numbers[i], numbers[i + 16] = block[low + i] & 15, block[low + i] >> 4
    if bits == 5:
        for i in range(COLUMNS):
            numbers[i] |= (block[at + i // 8] >> np.uint8(i % 8) & 1) << 4


@compiled()
def _read_k(block: Any, bits: int, numbers: Any, scales: Any, mins: Any, factors: Any) -> None:
    """Q4_K and Q5_K: scales and minima of six bits in twelve bytes."""
    factors[0], factors[1] = _half(block, 0), _half(block, 2) ^ np.uint16(_SIGN)  # minima are subtracted
    for i in range(4):
        first, second, high = block[4 + i], block[8 + i], block[12 + i]
        scales[i], scales[4 + i] = first & 63, high & 15 | first >> 2 & 48
        mins[i], mins[4 + i] = second & 63, high >> 4 | second >> 2 & 48
    low = 16 + 32 * (bits - 4)
    for chunk in range(4):
        for i in range(COLUMNS):
            both = block[low + 32 * chunk + i]
            numbers[64 * chunk + i], numbers[64 * chunk + 32 + i] = both & 15, both >> 4
    if bits == 5:
        for group in range(8):
            for i in range(COLUMNS):
                numbers[32 * group + i] |= (block[16 + i] >> np.uint8(group) & 1) << 4


@compiled()
def _read_q6_k(block: Any, numbers: Any, scales: Any, factors: Any) -> None:
    factors[0] = _half(block, 208)
    for i in range(16):
        scales[i] = block[192 + i]
    for half in range(2):
        for i in range(COLUMNS):
            first, second, high = block[64 * half + i], block[64 * half + 32 + i], block[128 + 32 * half + i]
            at = 128 * half + i
            numbers[at], numbers[at + 32] = first & 15 | (high & 3) << 4, second & 15 | (high >> 2 & 3) << 4
            numbers[at + 64], numbers[at + 96] = first >> 4 | (high >> 4 & 3) << 4, second >> 4 | high >> 6 << 4


@compiled()
def _read_iq4_xs(block: Any, numbers: Any, scales: Any, factors: Any) -> None:
    factors[0] = _half(block, 0)
    high = _half(block, 2)
    for group in range(8):
        low = block[4 + group // 2] >> np.uint8(4 * (group % 2)) & 15
        scales[group] = np.uint16((low | (high >> np.uint16(2 * group) & 3) << 4) - 32) & np.uint16(255)
        for i in range(COLUMNS // 2):
            both = block[8 + 16 * group + i]
            numbers[32 * group + i], numbers[32 * group + 16 + i] = both & 15, both >> 4


class Layout(NamedTuple):
    """A kind of block and the layout of its panels, as numbers for compiled code."""

    kind: int  # index in KINDS
    bits: int
    has_min: bool
    nested: bool
    signed_scales: bool
    offset: int
    parts: int  # scales per group
    groups: int  # groups per unit
    file_groups: int  # groups per block of the file
    unit_bytes: int
    group_bytes: int
    scale_bytes: int
    scales_at: int
    mins_at: int
    numbers_at: int

    @classmethod
    def of(cls, kind: BlockKind) -> Layout:
        own = {name: getattr(kind, name) for name in cls._fields if hasattr(kind, name)}
        parts, file_groups = COLUMNS // kind.scale_columns, kind.columns // COLUMNS
        return cls(kind=list(KINDS).index(kind.name), parts=parts, file_groups=file_groups, **own)


_Q4_K, _Q5_K, _Q6_K, _IQ4_XS = (list(KINDS).index(name) for name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))


@compiled_and_kept()
def pack_panels(rows: Any, order: Any, layout: Layout, panels: Any) -> None:
    """Pack the rows `order` of `rows` [rows, blocks, bytes] into `panels` [panels, bytes]."""
    numbers = np.zeros(_UNIT, dtype=np.uint8)
    scales, mins, factors = np.zeros(16, np.uint16), np.zeros(16, np.uint16), np.zeros(2, np.uint16)
    for panel in range(panels.shape[0]):
        out = panels[panel]
        out[:] = 0
        for channel in range(min(PANEL, order.shape[0] - panel * PANEL)):
            row = rows[order[panel * PANEL + channel]]
            for block in range(row.shape[0]):
                _read(row[block], layout, numbers, scales, mins, factors)
                _put_block(numbers, scales, mins, factors, layout, block, channel, out)


@compiled()
def _read(block: Any, layout: Layout, numbers: Any, scales: Any, mins: Any, factors: Any) -> None:
    if layout.kind == _Q4_K or layout.kind == _Q5_K:
        _read_k(block, layout.bits, numbers, scales, mins, factors)
    elif layout.kind == _Q6_K:
        _read_q6_k(block, numbers, scales, factors)
    elif layout.kind == _IQ4_XS:
        _read_iq4_xs(block, numbers, scales, factors)
    else:
        _read_small(block, layout.bits, layout.parts, layout.has_min, numbers, scales, mins)


@compiled()
def _put_block(
    numbers: Any, scales: Any, mins: Any, factors: Any, layout: Layout, block: int, channel: int, out: Any
) -> None:
    width = 1 if layout.nested else 2
    for each in range(layout.file_groups):
        place = block * layout.file_groups + each
        unit, group = place // layout.groups * layout.unit_bytes, place % layout.groups
        _put_numbers(numbers, each, layout.bits, channel, out, unit + layout.numbers_at + group * layout.group_bytes)
        for part in range(layout.parts):
            at = unit + layout.scales_at + group * layout.scale_bytes + width * (part * PANEL + channel)
            _put(out, at, scales[each * layout.parts + part], width)
            if layout.has_min:
                _put(out, at - layout.scales_at + layout.mins_at, mins[each * layout.parts + part], width)
    if layout.nested:
        at = block * layout.unit_bytes + 2 * channel
        _put(out, at, factors[0], 2)
        if layout.has_min:
            _put(out, at + 2 * PANEL, factors[1], 2)


@compiled()
def _put(out: Any, at: int, value: Any, width: int) -> None:
    out[at] = np.uint8(value & np.uint16(255))
    if width == 2:
        out[at + 1] = np.uint8(value >> np.uint16(8))


@compiled()
def _put_numbers(numbers: Any, group: int, bits: int, channel: int, out: Any, at: int) -> None:
    more = bits - 4
    for i in range(COLUMNS):
        number = numbers[group * COLUMNS + i]
        step, byte = i // STEP, STEP * channel + i % STEP
        if bits == 8:
            out[at + 64 * step + byte] = number
            continue
        out[at + 64 * (step // 2) + byte] |= (number & 15) << np.uint8(4 * (step % 2))
        if more:
            plane, shift = step // (8 // more), more * (step % (8 // more))
            out[at + 256 + 64 * plane + byte] |= (number >> 4) << np.uint8(shift)


@compiled_and_kept()
def unpack_channels(panels: Any, channels: Any, layout: Layout, values: Any, halves: Any, out: Any) -> None:
    """Write the weights of `channels` to out [channels, depth] float32. `values` are those of the numbers of a block,
    `halves` those of all float16 numbers."""
    for index in range(channels.shape[0]):
        panel, channel = panels[channels[index] // PANEL], channels[index] % PANEL
        for i in range(out.shape[1]):
            place = i // COLUMNS
            unit, group = place // layout.groups * layout.unit_bytes, place % layout.groups
            at = unit + layout.numbers_at + group * layout.group_bytes
            number = _number(panel, at, i % COLUMNS, channel, layout.bits)
            scale, low = _scale(panel, unit, group, i % COLUMNS * layout.parts // COLUMNS, channel, layout, halves)
            out[index, i] = (values[number] - np.float32(layout.offset)) * scale + low


@compiled()
def _number(panel: Any, at: int, i: int, channel: int, bits: int) -> Any:
    step, byte = i // STEP, STEP * channel + i % STEP
    if bits == 8:
        return panel[at + 64 * step + byte]
    number = panel[at + 64 * (step // 2) + byte] >> np.uint8(4 * (step % 2)) & 15
    if bits > 4:
        more = bits - 4
        high = panel[at + 256 + 64 * (step // (8 // more)) + byte]
        number |= (high >> np.uint8(more * (step % (8 // more))) & ((1 << more) - 1)) << 4
    return np.uint8(number)


@compiled()
def _scale(panel: Any, unit: int, group: int, part: int, channel: int, layout: Layout, halves: Any) -> Any:
    """The scale and the minimum of a column."""
    width = 1 if layout.nested else 2
    at = unit + layout.scales_at + group * layout.scale_bytes + width * (part * PANEL + channel)
    low_at = at - layout.scales_at + layout.mins_at
    low = np.float32(0.0)
    if not layout.nested:
        if layout.has_min:
            low = halves[_half(panel, low_at)]
        return halves[_half(panel, at)], low
    factor = unit + 2 * channel
    small = np.float32(panel[at])
    if layout.signed_scales and panel[at] > 127:
        small -= np.float32(256.0)
    if layout.has_min:
        low = np.float32(panel[low_at]) * halves[_half(panel, factor + 2 * PANEL)]
    return small * halves[_half(panel, factor)], low


def pack(kind: BlockKind, rows: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """Pack `rows` [rows, bytes] of a file, in `order`, into new panels [panels, bytes]."""
    blocks = rows.reshape(len(rows), -1, kind.num_bytes)
    if order is None:
        order = np.arange(len(rows))
    panels = aligned((-(-len(order) // PANEL), kind.panel_bytes(blocks.shape[1] * kind.columns)))
    pack_panels(blocks, order, Layout.of(kind), panels)
    return panels


def unpack(kind: BlockKind, panels: np.ndarray, channels: np.ndarray, depth: int) -> np.ndarray:
    """The weights [channels, depth] float32 of some channels."""
    out = np.empty((len(channels), depth), dtype=np.float32)
    unpack_channels(panels, channels, *_form(kind), _all_halves(), out)
    return out


@cache
def _form(kind: BlockKind) -> tuple[Layout, np.ndarray]:
    """The layout of a kind's panels, and the values of its numbers."""
    return Layout.of(kind), np.array(kind.values or range(256), dtype=np.float32)


@cache
def _all_halves() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
