"""The block types of GGUF files, and how their numbers lie in a panel.

A panel holds 16 output channels. Along the depth it is a sequence of units of 64 or 256 columns:

    factors | scales of all groups | minima of all groups | (padded to a line) numbers of group 0 | group 1 | ...

Scales come first because memory is read fastest in order. A group has 32 columns. Its numbers are in steps of four
columns, 64 bytes each: bytes 4c to 4c + 3 are the columns of channel c. Two steps share the nibbles of 64 bytes; what a
number has above four bits follows as bit planes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    def scale_bytes(self) -> int:
        """Bytes of the scales of a group, and of its minima."""
        return PANEL * (COLUMNS // self.scale_columns) * (1 if self.nested else 2)

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

KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", 32, 18, 4, offset=8),
        BlockKind("Q4_1", 32, 20, 4, has_min=True),
        BlockKind("Q5_0", 32, 22, 5, offset=16),
        BlockKind("Q5_1", 32, 24, 5, has_min=True),
        BlockKind("Q8_0", 32, 34, 8, offset=128),
        BlockKind("IQ4_NL", 32, 18, 4, offset=128, values=_IQ4),
        BlockKind("Q4_K", 256, 144, 4, has_min=True, nested=True),
        BlockKind("Q5_K", 256, 176, 5, has_min=True, nested=True),
        BlockKind("Q6_K", 256, 210, 6, offset=32, nested=True, signed_scales=True, scale_columns=16),
        BlockKind("IQ4_XS", 256, 136, 4, offset=128, nested=True, signed_scales=True, values=_IQ4),
    )
}
