"""Splits the attention of a step into work items for threads: spans of a row's context, or tiles of long chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEW = 16  # Chunks of at most this many tokens are computed row by row, which is faster and gives the same bits.
QUERIES = 64  # tokens per query tile
SCALE_BYTES = 4  # a float32 behind the 8-bit integers of a token and head
PIECE = 256  # context positions per work item; fixed, so that a row is always summed in the same order


class Pieces(NamedTuple):
    """AttentionWork items computed row by row: each is a span of one row's context. All [pieces] int64."""

    rows: np.ndarray
    sequences: np.ndarray
    lengths: np.ndarray  # visible positions of the row, itself included
    starts: np.ndarray  # first position of this span
    counts: np.ndarray  # number of spans of this row


class Tiles(NamedTuple):
    """AttentionWork items computed in tiles: each is a run of rows of one sequence. All [tiles] int64."""

    rows: np.ndarray  # first row
    counts: np.ndarray  # rows
    sequences: np.ndarray
    positions: np.ndarray  # position of the first row


class SharedPieces(NamedTuple):
    """Spans that are computed once for the rows of several sequences, whose tables have the same blocks there. All
    int64."""

    sequences: np.ndarray  # [shared]: one of the sequences
    starts: np.ndarray  # [shared]: first position, of PIECE
    firsts: np.ndarray  # [shared]: where its pieces begin in `pieces`
    counts: np.ndarray  # [shared]: number of pieces, one for each row
    pieces: np.ndarray  # [n]: pieces, by the position of their rows


_NO_TILES = Tiles(*(np.empty(0, dtype=np.int64) for _ in Tiles._fields))
NO_SHARED_PIECES = SharedPieces(*(np.empty(0, dtype=np.int64) for _ in SharedPieces._fields))


class Partial(NamedTuple):
    """Results of the spans, before those of one row are merged."""

    sums: np.ndarray  # [pieces, heads, value_dim] float32
    peaks: np.ndarray  # [pieces, heads] float32
    totals: np.ndarray  # [pieces, heads] float32


class AttentionWork(NamedTuple):
    """The attention work of one step, the same for all layers."""

    pieces: Pieces
    tiles: Tiles
    partial: Partial
    several: np.ndarray  # [T] int64: first piece of a row that has several, else -1
    order: np.ndarray  # int64: pieces that are computed one by one, in this order
    shared: SharedPieces


def split_work(
    offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, heads: int, value_dim: int, *, few: int = FEW
) -> AttentionWork:
    """Split a step: sequence i has the rows [offsets[i], offsets[i + 1]) at the positions [starts[i], ends[i]).

    Sequences with more than `few` new tokens are computed in tiles."""
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
    partial = _room_for_partial(len(of) if len(first) else 0, heads, value_dim)
    return AttentionWork(pieces, tiles, partial, several, np.arange(len(of)), NO_SHARED_PIECES)


FEW_PIECES = 64  # `work_by_rows` takes as long as `split_work` with some 100 pieces: 40 us.


def work_by_rows(sequences: Sequence[int], lengths: Sequence[int], heads: int, value_dim: int) -> AttentionWork:
    """AttentionWork of single rows: row i is a token of sequences[i] with lengths[i] visible positions. Faster than
    `split_work` for a few rows."""
    found = [
        (row, sequence, length, start, -(-length // PIECE))
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        for start in range(0, length, PIECE)
    ]
    pieces = Pieces(*np.array(found, dtype=np.int64).T.copy())
    several = np.full(len(sequences), -1, dtype=np.int64)
    order = np.arange(len(found))
    if len(found) == len(sequences):
        partial = _room_for_partial(0, heads, value_dim)
        return AttentionWork(pieces, _NO_TILES, partial, several, order, NO_SHARED_PIECES)
    first = np.flatnonzero((pieces.starts == 0) & (pieces.counts > 1))
    several[pieces.rows[first]] = first
    partial = _room_for_partial(len(found), heads, value_dim)
    return AttentionWork(pieces, _NO_TILES, partial, several, order, NO_SHARED_PIECES)


FEWEST_SHARING = 4  # Fewer rows are faster one by one.


def share_pieces(work: AttentionWork, tables: np.ndarray, block_size: int) -> AttentionWork:
    """The same work with pieces that lie in the same blocks of several rows computed once: requests behind a common
    prompt, the completions of one, beams, and a token with its drafts."""
    pieces = work.pieces
    if PIECE % block_size or len(work.several) < FEWEST_SHARING or len(tables) < 2:
        return work
    sequences, rows_of = np.unique(pieces.sequences[pieces.starts == 0], return_counts=True)
    if len(np.unique(tables[sequences, 0])) == len(sequences) and rows_of.max(initial=0) < FEWEST_SHARING:
        return work  # A prefix that is shared is so from its first block on.
    whole = np.flatnonzero((pieces.starts + PIECE <= pieces.lengths) & (pieces.counts > 1))
    first_blocks = pieces.starts[whole] // block_size
    blocks = tables[pieces.sequences[whole][:, None], first_blocks[:, None] + np.arange(PIECE // block_size)]
    _, example, group = np.unique(blocks[:, 0], return_index=True, return_inverse=True)
    same = (blocks == blocks[example[group]]).all(axis=1)
    sizes = np.bincount(group[same], minlength=len(example))
    parts = []
    for index in np.flatnonzero(sizes >= FEWEST_SHARING):
        members = whole[same & (group == index)]
        members = members[np.argsort(pieces.lengths[members], kind="stable")]
        parts += [members[first : first + QUERIES] for first in range(0, len(members), QUERIES)]
    if not parts:
        return work
    first, counts = np.array([part[0] for part in parts]), np.array([len(part) for part in parts])
    together = np.concatenate(parts)
    shared = SharedPieces(pieces.sequences[first], pieces.starts[first], np.cumsum(counts) - counts, counts, together)
    alone = np.ones(len(pieces.rows), dtype=bool)
    alone[together] = False
    return work._replace(order=np.flatnonzero(alone), shared=shared)


def _room_for_partial(pieces: int, heads: int, value_dim: int) -> Partial:
    return Partial(
        np.empty((pieces, heads, value_dim), dtype=np.float32),
        np.empty((pieces, heads), dtype=np.float32),
        np.empty((pieces, heads), dtype=np.float32),
    )


def _enumerate(items: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat each item `count` times, numbered 0, 1, ... within its repetitions."""
    return np.repeat(items, counts), np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
