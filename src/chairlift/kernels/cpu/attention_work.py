"""How the attention of a step is cut up among threads: rows by stretches of their context, long chunks by tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# New tokens of a sequence up to which they are computed row by row. A token and its drafts are no more than that, so
# that each comes out as it would alone: tiles add up in another order.
FEW = 16
QUERIES = 64  # tokens of a tile
PIECE = 256  # positions of a row that one thread goes through; always the same, so that a row is summed in one order


class Pieces(NamedTuple):
    """What is to be computed row by row: each a stretch of positions of one row. All [pieces] int64."""

    rows: np.ndarray
    sequences: np.ndarray
    lengths: np.ndarray  # positions that the row sees, itself included
    starts: np.ndarray  # the first position of this stretch
    counts: np.ndarray  # stretches of this row; the first of them stands where the row's index says


class Tiles(NamedTuple):
    """What is to be computed in tiles: each some neighbouring rows of one sequence. All [tiles] int64."""

    rows: np.ndarray  # the first row
    counts: np.ndarray  # rows
    sequences: np.ndarray
    positions: np.ndarray  # of the first row


_NO_TILES = Tiles(*(np.empty(0, dtype=np.int64) for _ in Tiles._fields))


class Partial(NamedTuple):
    """What a stretch of a row came to, before it is merged with the row's others."""

    sums: np.ndarray  # [pieces, heads, head_dim] float32
    peaks: np.ndarray  # [pieces, heads] float32
    totals: np.ndarray  # [pieces, heads] float32


class Work(NamedTuple):
    """The attention of one step, cut up. The same for all layers."""

    pieces: Pieces
    tiles: Tiles
    partial: Partial
    several: np.ndarray  # [T] int64: the first piece of a row that comes in several, else -1


def split_work(
    offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, heads: int, head_dim: int, *, few: int = FEW
) -> Work:
    """Sequence i owns the rows [offsets[i], offsets[i + 1]), its tokens at the positions [starts[i], ends[i]). More
    than `few` of them are computed in tiles."""
    counts = ends - starts
    by_row = np.flatnonzero(counts <= few)
    sequence, place = _enumerate(by_row, counts[by_row])
    row, length = offsets[sequence] + place, starts[sequence] + place + 1
    stretches = -(-length // PIECE)
    of, stretch = _enumerate(np.arange(len(row)), stretches)
    pieces = Pieces(row[of], sequence[of], length[of], stretch * PIECE, stretches[of])
    several = np.full(offsets[-1], -1, dtype=np.int64)
    first = np.flatnonzero((stretch == 0) & (stretches[of] > 1))
    several[pieces.rows[first]] = first

    many = np.flatnonzero(counts > few)
    sequence, tile = _enumerate(many, -(-counts[many] // QUERIES))
    skipped = tile * QUERIES
    tiles = Tiles(
        offsets[sequence] + skipped,
        np.minimum(counts[sequence] - skipped, QUERIES),
        sequence,
        starts[sequence] + skipped,
    )
    return Work(pieces, tiles, _room_for_partial(len(of) if len(first) else 0, heads, head_dim), several)


def work_by_rows(sequences: Sequence[int], lengths: Sequence[int], heads: int, head_dim: int) -> Work:
    """Row i is a token of this sequence that sees so many positions. The same as `split_work` of rows without tiles,
    and for a handful of them sooner done."""
    found = [
        (row, sequence, length, start, -(-length // PIECE))
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        for start in range(0, length, PIECE)
    ]
    pieces = Pieces(*np.array(found, dtype=np.int64).T.copy())
    several = np.full(len(sequences), -1, dtype=np.int64)
    first = np.flatnonzero((pieces.starts == 0) & (pieces.counts > 1))
    several[pieces.rows[first]] = first
    num_partial = len(found) if len(first) else 0
    return Work(pieces, _NO_TILES, _room_for_partial(num_partial, heads, head_dim), several)


def _room_for_partial(pieces: int, heads: int, head_dim: int) -> Partial:
    return Partial(
        np.empty((pieces, heads, head_dim), dtype=np.float32),
        np.empty((pieces, heads), dtype=np.float32),
        np.empty((pieces, heads), dtype=np.float32),
    )


def _enumerate(items: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each item as often as its count says, with 0, 1, ... beside it."""
    return np.repeat(items, counts), np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
