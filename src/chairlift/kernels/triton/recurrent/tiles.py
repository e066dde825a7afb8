"""How kernels of recurrent layers find their rows.

A tile is some consecutive rows of one sequence, counted from the sequence's first row of the step. Programs find their
tile from `starts` in device memory, so that a captured step serves any split of its rows into sequences.
"""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, next_power_of_2


class SlotBatch(Protocol):
    """`attention.recurrent.RecurrentBatch`."""

    @property
    def starts(self) -> Tensor: ...

    @property
    def read(self) -> Tensor: ...

    @property
    def write(self) -> Tensor: ...

    @property
    def longest(self) -> int: ...


def num_tiles(batch: SlotBatch, rows: int) -> int:
    """No fewer tiles than the batch has, whatever its split into sequences is."""
    sequences = len(batch.read)
    return sequences if batch.longest <= rows else cdiv(len(batch.write), rows) + sequences


def search_width(batch: SlotBatch) -> int:
    """The `SEQUENCES` argument of `find_tile`."""
    return next_power_of_2(len(batch.read))


@triton.jit
def find_tile(
    starts_ptr,
    tile,
    num_sequences,
    ROWS: tl.constexpr,  # A tile has this many.
    ONE_EACH: tl.constexpr,  # no sequence has more than one tile: tile i is that of sequence i
    SEQUENCES: tl.constexpr,
):
    """The sequence of a tile (num_sequences if there is no such tile), its first row, and the sequence's rows."""
    if ONE_EACH:
        sequence = tile
        offset = 0
    else:
        each = tl.arange(0, SEQUENCES)
        known = each < num_sequences
        first = tl.load(starts_ptr + each, mask=known, other=0)
        after = tl.load(starts_ptr + each + 1, mask=known, other=0)
        tiles = tl.where(known, (after - first + ROWS - 1) // ROWS, 0)
        ends = tl.cumsum(tiles, 0)
        sequence = tl.sum((known & (ends <= tile)).to(tl.int32), 0)
        offset = (tile - tl.sum(tl.where(each < sequence, tiles, 0), 0)) * ROWS
    inside = sequence < num_sequences
    begin = tl.load(starts_ptr + sequence, mask=inside, other=0)
    end = tl.load(starts_ptr + sequence + 1, mask=inside, other=0)
    return sequence, offset, begin, end
