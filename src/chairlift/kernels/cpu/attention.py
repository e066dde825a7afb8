"""Ragged paged attention for a team of threads: scores, softmax and sum in one pass over the KV blocks.

A few new tokens of a sequence are computed row by row, where reading the cache is the cost. More new tokens are
computed in tiles of queries and keys, where arithmetic is the cost and a loaded tile of keys serves all queries of the
tile. Both keep a running maximum and sum (as FlashAttention does), so no score matrix is stored. Each key and value is
loaded once for all query heads that share it.

Values may have another size than keys. In latent attention they are the first numbers of the keys: then `values` is the
same array as `keys`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.attention_loads import (
    TILE,
    distance_ahead,
    fetch_tile,
    has_scales,
    has_score_tile,
    load_columns,
    load_rows,
    load_scales,
    numbers_of,
    place_of,
    score_keys,
    split_query,
    store_row,
)
from chairlift.kernels.cpu.attention_work import PIECE, QUERIES, AttentionWork, Partial, Pieces, Tiles
from chairlift.kernels.cpu.compiling import FAST, borrowed, compiled, exp, from_sortable, sortable, widen
from chairlift.kernels.cpu.simd import F32_COLUMNS, F32_ROWS, LANES, dots_tile, f32_tile, f32_tile_ahead
from chairlift.kernels.cpu.threads import claim

KEYS = F32_COLUMNS  # key positions of a tile
NOTHING = np.float32(-1e30)

_tile = f32_tile(F32_ROWS)
_add_6, _add_4, _add_3, _add_2, _add_1 = (f32_tile_ahead(rows) for rows in (F32_ROWS, 4, 3, 2, 1))
_dots_6, _dots_5, _dots_4, _dots_3, _dots_2, _dots_1 = (dots_tile(rows) for rows in (F32_ROWS, 5, 4, 3, 2, 1))
_F32 = np.float32(0.0)


class Score(NamedTuple):
    """How a layer computes its scores."""

    scale: np.float32
    window: int  # 0: none
    softcap: np.float32  # 0: none
    chunk: int  # 0: none
    sinks: np.ndarray  # [heads] float32, empty: none


class Cache(NamedTuple):
    """One layer of the paged cache, and the block tables of the sequences."""

    # [blocks, block_size, kv_heads, head_dim] float32, bfloat16 as uint16, or int8 with a scale behind each head's row
    keys: np.ndarray
    values: np.ndarray  # [blocks, block_size, kv_heads, value_dim or more], of which the first value_dim are read
    tables: np.ndarray  # [S, longest] int32


class _Scratch(NamedTuple):
    """Scratch memory of one thread, all float32. R: rows of a query tile, one per token and query head."""

    queries: np.ndarray  # [R, head_dim], scaled
    sums: np.ndarray  # [R, padded value_dim]
    peaks: np.ndarray  # [R]
    totals: np.ndarray  # [R]
    scores: np.ndarray  # [F32_ROWS, KEYS]
    keys: np.ndarray  # [head_dim, KEYS]
    values: np.ndarray  # [KEYS, padded value_dim]
    scales: np.ndarray  # [2, KEYS] of 8-bit keys and values
    parts: np.ndarray  # [heads, 2 * head_dim] uint8: queries split for keys of 8 bits
    part_scales: np.ndarray  # [heads]


@compiled(FAST)
def store(cache: Cache, slot: int, k: Any, v: Any) -> None:
    """Put one token's key [kv_heads, head_dim] and value [kv_heads, value_dim] into its slot (block * block_size +
    offset)."""
    block, offset = slot // cache.keys.shape[1], slot % cache.keys.shape[1]
    for head in range(k.shape[0]):
        store_row(cache.keys, block, offset, head, k)
        if cache.values.ctypes.data != cache.keys.ctypes.data:
            store_row(cache.values, block, offset, head, v)


@compiled(FAST)
def attend(shared: Any, members: int, q: Any, cache: Cache, work: AttentionWork, how: Score, out: Any) -> None:
    """Compute out [T, heads, value_dim] from q [T, heads, head_dim], both float32, with all threads of the team.

    Call `barrier` before and after, then `merge` for every row."""
    q, out = borrowed(q), borrowed(out)
    cache = Cache(borrowed(cache.keys), borrowed(cache.values), borrowed(cache.tables))
    pieces, tiles, partial = _borrowed_pieces(work.pieces), work.tiles, _borrowed_partial(work.partial)
    kv_heads, head_dim = cache.keys.shape[2], q.shape[2]
    group = q.shape[1] // kv_heads
    padded = (out.shape[2] + F32_COLUMNS - 1) // F32_COLUMNS * F32_COLUMNS
    queries = QUERIES if tiles.rows.shape[0] > 0 else 1
    most = max(queries * group, q.shape[1]) + F32_ROWS  # a tile may extend past the last row
    scratch = _Scratch(
        np.zeros((most, head_dim), dtype=np.float32),
        np.zeros((most, padded), dtype=np.float32),
        np.zeros(most, dtype=np.float32),
        np.zeros(most, dtype=np.float32),
        np.zeros((F32_ROWS, KEYS), dtype=np.float32),
        np.zeros((max(head_dim, KEYS), max(padded, KEYS)), dtype=np.float32),
        np.zeros((KEYS, padded), dtype=np.float32),
        np.zeros((2, KEYS), dtype=np.float32),
        np.zeros((q.shape[1], 2 * head_dim), dtype=np.uint8),
        np.zeros(q.shape[1], dtype=np.float32),
    )
    num_tiles = tiles.rows.shape[0] * kv_heads
    num_pieces = pieces.rows.shape[0]
    # Threads share the heads of a piece where there are too few pieces for all threads.
    shares = min(kv_heads, -(-members // max(1, num_pieces + num_tiles)))
    total = num_tiles + num_pieces * shares
    item = claim(shared, 1)
    while item < total:
        # Claim the next piece now, to prefetch its first keys; but leave the last ones to threads that are free. Tiles
        # are long, so that they are claimed one by one.
        following = claim(shared, 1) if num_tiles <= item and item + members < total else -1
        if item < num_tiles:  # tiles first, the last one first: it has the longest context
            _attend_tile(
                tiles.rows.shape[0] - 1 - item // kv_heads, item % kv_heads, q, cache, tiles, how, scratch, out
            )
        else:
            piece, share = (item - num_tiles) // shares, (item - num_tiles) % shares
            next_piece = (following - num_tiles) // shares if num_tiles <= following < total else -1
            begin, end = share * kv_heads // shares, (share + 1) * kv_heads // shares
            _attend_piece(piece, next_piece, begin, end, q, cache, pieces, how, partial, scratch, out)
        item = following if following >= 0 else claim(shared, 1)


@compiled()
def _borrowed_pieces(of: Pieces) -> Pieces:
    rows, sequences, lengths = borrowed(of.rows), borrowed(of.sequences), borrowed(of.lengths)
    return Pieces(rows, sequences, lengths, borrowed(of.starts), borrowed(of.counts))


@compiled()
def _borrowed_partial(of: Partial) -> Partial:
    return Partial(borrowed(of.sums), borrowed(of.peaks), borrowed(of.totals))


# Below, arrays are passed one by one and indexed in full: numba counts references to every slice and every tuple
# member, which costs more than the arithmetic.


@compiled(FAST)
def _attend_piece(
    piece: int,
    next_piece: int,
    first_kv_head: int,
    end_kv_head: int,
    q: Any,
    cache: Cache,
    pieces: Pieces,
    how: Score,
    partial: Partial,
    scratch: Any,
    out: Any,
) -> None:
    """Compute some heads of one piece, in most steps all: their keys and values are adjacent in memory.

    While a tile is computed, the next one is prefetched, at the end of the piece that of `next_piece` (-1: none)."""
    heads, value_dim = q.shape[1], out.shape[2]
    group, whole = heads // cache.keys.shape[2], pieces.counts[piece] == 1
    row, length, start, sequence = (
        pieces.rows[piece],
        pieces.lengths[piece],
        pieces.starts[piece],
        pieces.sequences[piece],
    )
    queries, sums, peaks, totals = scratch.queries, scratch.sums, scratch.peaks, scratch.totals
    scores, values, scales = scratch.scores, scratch.values, scratch.scales
    parts, part_scales = scratch.parts, scratch.part_scales
    end = min(length, start + PIECE)
    low = _first_visible(length - 1, how.window, how.chunk)
    rows = -(-group // -(-group // F32_ROWS))  # query heads at a time: equally many, at most F32_ROWS
    _begin_rows(q, row, 1, 0, heads, how.scale, queries, sums, peaks, totals)
    by_tiles = has_score_tile(cache.keys, queries)
    if by_tiles:
        for head in range(first_kv_head * group, end_kv_head * group):
            split_query(cache.keys, queries, head, parts, part_scales)
    if start == 0:  # exactly one piece of a row has the sinks
        _begin_with_sinks(how.sinks, 0, heads, heads, peaks, totals)
    # Start at a tile boundary, so that the order of summation does not depend on the window.
    for base in range(max(start, low // KEYS * KEYS), end, KEYS):
        count = min(KEYS, end - base)
        next_sequence, next_base, next_end = sequence, base + KEYS, end
        if base + KEYS >= end:
            next_end = 0
            if next_piece >= 0:
                next_sequence, next_end = pieces.sequences[next_piece], pieces.lengths[next_piece]
                next_low = _first_visible(next_end - 1, how.window, how.chunk)
                next_base = max(pieces.starts[next_piece], next_low // KEYS * KEYS)
        next_end = min(next_end, next_base + KEYS)
        for kv_head in range(first_kv_head, end_kv_head):
            share, shares = kv_head - first_kv_head, end_kv_head - first_kv_head  # A head prefetches its share.
            load_scales(cache.keys, cache.tables, sequence, base, count, kv_head, scales, 0)
            load_scales(cache.values, cache.tables, sequence, base, count, kv_head, scales, 1)
            fetch_tile(cache.keys, cache.tables, next_sequence, next_base + count, next_end, share, shares)
            fetched = 0 if value_dim % F32_COLUMNS else count  # the rest of the tile is prefetched while it is read
            fetch_tile(cache.values, cache.tables, next_sequence, next_base + fetched, next_end, share, shares)
            if value_dim % F32_COLUMNS:
                load_rows(cache.values, cache.tables, sequence, base, count, kv_head, value_dim, values)
            for first in range(kv_head * group, (kv_head + 1) * group, rows):
                last = min(first + rows, (kv_head + 1) * group)
                ahead = next_end if first == kv_head * group else 0  # prefetch once for all query heads
                _score(
                    queries,
                    parts,
                    part_scales,
                    by_tiles,
                    first,
                    last,
                    cache.keys,
                    cache.tables,
                    sequence,
                    base,
                    count,
                    kv_head,
                    scores,
                    next_sequence,
                    next_base,
                    ahead,
                )
                for line in range(last - first, F32_ROWS):  # padding rows: a tile adds all its rows
                    for j in range(KEYS):
                        scores[line, j] = np.float32(0.0)
                if has_scales(cache.keys):
                    _scale_lines(scores, last - first, scales, 0)
                for head in range(first, last):
                    _soften(scores, head - first, peaks, totals, sums, head, max(low - base, 0), count, how.softcap)
                if has_scales(cache.values):
                    _scale_lines(scores, last - first, scales, 1)
                if value_dim % F32_COLUMNS:
                    _add_values(sums, first, scores, values, count)
                else:
                    _add_stored(
                        sums,
                        first,
                        last,
                        scores,
                        cache.values,
                        cache.tables,
                        sequence,
                        base,
                        count,
                        kv_head,
                        next_sequence,
                        next_base,
                        ahead,
                    )
    for head in range(first_kv_head * group, end_kv_head * group):
        if whole:
            _finish_row(sums, totals, head, out, row, head)
        else:
            partial.peaks[piece, head] = peaks[head]
            partial.totals[piece, head] = totals[head]
            for i in range(value_dim):
                partial.sums[piece, head, i] = sums[head, i]


@compiled(FAST)
def _score(
    queries: Any,
    parts: Any,
    part_scales: Any,
    by_tiles: bool,
    first: int,
    last: int,
    side: Any,
    tables: Any,
    sequence: int,
    base: int,
    count: int,
    kv_head: int,
    scores: Any,
    next_sequence: int,
    next_base: int,
    next_end: int,
) -> None:
    """Compute rows of scores, the products of queries with cached keys, and prefetch the keys of the next tile."""
    like, size, head_dim, block_size = side[0, 0, 0, 0], side.itemsize, numbers_of(side), side.shape[1]
    whole, stride = head_dim // LANES * LANES, side.shape[2] * side.shape[3]
    j = 0
    while j < count:  # Blocks are run through whole, to divide once per block.
        block, slot = place_of(tables, sequence, base + j, block_size)
        run = min(block_size - slot, count - j)
        start = side.ctypes.data + ((block * block_size + slot) * stride + kv_head * side.shape[3]) * size
        ahead = distance_ahead(side, tables, block * block_size + slot, next_sequence, next_base + j, next_end)
        # Whole tiles are within the block. Scores behind the last position are not used.
        if by_tiles and (block_size % TILE == 0 or run % TILE == 0):
            for done in range(0, run, TILE):
                target = scores.ctypes.data + (j + done) * 4
                keys = start + done * stride * size
                score_keys(side, target, 4 * KEYS, parts, part_scales, first, last, keys, ahead)
            j += run
            continue
        done = 0
        while done + LANES <= run or (done < run and block_size % LANES == 0):
            target, keys = scores.ctypes.data + (j + done) * 4, start + done * stride * size
            query = queries.ctypes.data + first * head_dim * 4
            if last - first == 1:
                _dots_1(target, KEYS, query, head_dim, keys, stride, whole, ahead, like)
            elif last - first == 2:
                _dots_2(target, KEYS, query, head_dim, keys, stride, whole, ahead, like)
            elif last - first == 3:
                _dots_3(target, KEYS, query, head_dim, keys, stride, whole, ahead, like)
            elif last - first == 4:
                _dots_4(target, KEYS, query, head_dim, keys, stride, whole, ahead, like)
            elif last - first == 5:
                _dots_5(target, KEYS, query, head_dim, keys, stride, whole, ahead, like)
            else:
                _dots_6(target, KEYS, query, head_dim, keys, stride, whole, ahead, like)
            done += LANES
        for row in range(first, last):
            line = row - first
            for at in range(done, run):
                score = np.float32(0.0)
                for i in range(whole):
                    score += queries[row, i] * widen(side[block, slot + at, kv_head, i])
                scores[line, j + at] = score
            if whole < head_dim:
                for at in range(run):
                    for i in range(whole, head_dim):
                        scores[line, j + at] += queries[row, i] * widen(side[block, slot + at, kv_head, i])
        j += run


@compiled()
def _add_stored(
    sums: Any,
    first: int,
    last: int,
    scores: Any,
    side: Any,
    tables: Any,
    sequence: int,
    base: int,
    count: int,
    kv_head: int,
    next_sequence: int,
    next_base: int,
    next_end: int,
) -> None:
    """Like `_add_values`, reading values from the blocks, and prefetch those of the next tile."""
    like, size, block_size = side[0, 0, 0, 0], side.itemsize, side.shape[1]
    padded, stride = sums.shape[1], side.shape[2] * side.shape[3]
    j = 0
    while j < count:
        block, slot = place_of(tables, sequence, base + j, block_size)
        run = min(block_size - slot, count - j)
        weights = scores.ctypes.data + j * 4
        ahead = distance_ahead(side, tables, block * block_size + slot, next_sequence, next_base + j, next_end)
        for column in range(0, padded, F32_COLUMNS):
            place = (block * block_size + slot) * stride + kv_head * side.shape[3] + column
            value = side.ctypes.data + place * size
            target = sums.ctypes.data + (first * padded + column) * 4
            if last - first == 1:
                _add_1(target, padded, weights, KEYS, value, stride, run, ahead, like)
            elif last - first == 2:
                _add_2(target, padded, weights, KEYS, value, stride, run, ahead, like)
            elif last - first == 3:
                _add_3(target, padded, weights, KEYS, value, stride, run, ahead, like)
            elif last - first == 4:
                _add_4(target, padded, weights, KEYS, value, stride, run, ahead, like)
            else:
                _add_6(target, padded, weights, KEYS, value, stride, run, ahead, like)
        j += run


@compiled(FAST)
def merge(row: int, work: AttentionWork, out: Any) -> None:
    """Merge the pieces of a row into out [T, heads, value_dim], if it was computed in several."""
    first = work.several[row]
    if first < 0:
        return
    partial, last = work.partial, first + work.pieces.counts[first]
    for head in range(out.shape[1]):
        peak = NOTHING
        for piece in range(first, last):
            peak = max(peak, partial.peaks[piece, head])
        total = np.float32(0.0)
        for piece in range(first, last):
            total += partial.totals[piece, head] * exp(partial.peaks[piece, head] - peak)
        target = out[row, head]
        target[:] = np.float32(0.0)
        for piece in range(first, last):
            share = exp(partial.peaks[piece, head] - peak) / total
            for i in range(target.shape[0]):
                target[i] += partial.sums[piece, head, i] * share


@compiled(FAST)
def _attend_tile(
    tile: int, kv_head: int, q: Any, cache: Cache, tiles: Tiles, how: Score, scratch: Any, out: Any
) -> None:
    head_dim, group = q.shape[2], q.shape[1] // cache.keys.shape[2]
    first_row, tokens, position = tiles.rows[tile], tiles.counts[tile], tiles.positions[tile]
    sequence, rows, softcap = tiles.sequences[tile], tokens * group, how.softcap
    queries, sums, peaks, totals = scratch.queries, scratch.sums, scratch.peaks, scratch.totals
    scores, keys, values, scales = scratch.scores, scratch.keys, scratch.values, scratch.scales
    _begin_rows(q, first_row, tokens, kv_head, group, how.scale, queries, sums, peaks, totals)
    _begin_with_sinks(how.sinks, kv_head * group, group, rows, peaks, totals)
    low = _first_visible(position, how.window, how.chunk)
    for base in range(low // KEYS * KEYS, position + tokens, KEYS):
        count = min(KEYS, position + tokens - base)
        load_columns(cache.keys, cache.tables, sequence, base, count, kv_head, keys)
        load_rows(cache.values, cache.tables, sequence, base, count, kv_head, out.shape[2], values)
        load_scales(cache.keys, cache.tables, sequence, base, count, kv_head, scales, 0)
        load_scales(cache.values, cache.tables, sequence, base, count, kv_head, scales, 1)
        for first in range(0, rows, F32_ROWS):
            last = min(first + F32_ROWS, rows)
            if base > position + (last - 1) // group:
                continue  # every key of the tile is after these rows
            for line in range(F32_ROWS):
                for j in range(KEYS):
                    scores[line, j] = np.float32(0.0)
            left = queries.ctypes.data + first * head_dim * 4
            _tile(scores.ctypes.data, KEYS, left, head_dim, keys.ctypes.data, keys.shape[1], head_dim, _F32)
            if has_scales(cache.keys):
                _scale_lines(scores, F32_ROWS, scales, 0)
            for row in range(first, last):
                sees = position + row // group + 1 - base  # visible positions of this tile, if positive
                cut = max(_first_visible(base + sees - 1, how.window, how.chunk) - base, 0)
                _soften(scores, row - first, peaks, totals, sums, row, cut, min(sees, count), softcap)
            if has_scales(cache.values):
                _scale_lines(scores, F32_ROWS, scales, 1)
            _add_values(sums, first, scores, values, count)
    for row in range(rows):
        _finish_row(sums, totals, row, out, first_row + row // group, kv_head * group + row % group)


@compiled(FAST)
def _first_visible(position: int, window: int, chunk: int) -> int:
    """The first position that the token at `position` sees."""
    first = max(0, position - window + 1) if window > 0 else 0
    return max(first, position // chunk * chunk) if chunk > 0 else first


@compiled(FAST)
def _begin_with_sinks(sinks: Any, first: int, heads: int, rows: int, peaks: Any, totals: Any) -> None:
    """Begin the softmax of each row with its head's sink, which has the weight one and no value."""
    if sinks.shape[0] > 0:
        for row in range(rows):
            peaks[row], totals[row] = sinks[first + row % heads], np.float32(1.0)


@compiled(FAST)
def _begin_rows(
    q: Any,
    row: int,
    tokens: int,
    kv_head: int,
    group: int,
    scale: Any,
    queries: Any,
    sums: Any,
    peaks: Any,
    totals: Any,
) -> None:
    for token in range(tokens):
        for member in range(group):
            r = token * group + member
            peaks[r], totals[r] = NOTHING, np.float32(0.0)
            for i in range(q.shape[2]):
                queries[r, i] = q[row + token, kv_head * group + member, i] * scale
            for i in range(sums.shape[1]):
                sums[r, i] = np.float32(0.0)


@compiled(FAST)
def _scale_lines(scores: Any, lines: int, scales: Any, side: int) -> None:
    for line in range(lines):
        for j in range(KEYS):
            scores[line, j] *= scales[side, j]


@compiled(FAST)
def _soften(
    scores: Any, line: int, peaks: Any, totals: Any, sums: Any, row: int, low: int, high: int, softcap: Any
) -> None:
    """Turn the scores in [low, high) of a row into softmax weights and rescale its earlier sums to the new maximum."""
    if softcap > 0:
        for j in range(KEYS):
            bent = exp(np.float32(2.0) * scores[line, j] / softcap)
            scores[line, j] = softcap * (np.float32(1.0) - np.float32(2.0) / (bent + np.float32(1.0)))
    for j in range(min(low, KEYS)):
        scores[line, j] = -np.inf
    for j in range(max(high, 0), KEYS):
        scores[line, j] = -np.inf
    highest = sortable(peaks[row])
    for j in range(KEYS):
        highest = np.int32(max(highest, sortable(scores[line, j])))
    peak = from_sortable(highest)
    total = np.float32(0.0)
    for j in range(KEYS):
        weight = exp(scores[line, j] - peak)
        scores[line, j] = weight
        total += weight
    shrink = exp(peaks[row] - peak)
    peaks[row] = peak
    totals[row] = totals[row] * shrink + total
    if shrink != np.float32(1.0):
        for i in range(sums.shape[1]):
            sums[row, i] *= shrink


@compiled()
def _add_values(sums: Any, first: int, scores: Any, values: Any, count: int) -> None:
    """Add the weighted values to the sums of some rows."""
    padded = sums.shape[1]
    for column in range(0, padded, F32_COLUMNS):
        target, source = sums.ctypes.data + (first * padded + column) * 4, values.ctypes.data + column * 4
        _tile(target, padded, scores.ctypes.data, KEYS, source, padded, count, _F32)


@compiled(FAST)
def _finish_row(sums: Any, totals: Any, row: int, out: Any, to: int, head: int) -> None:
    inverse = np.float32(1.0) / totals[row]
    for i in range(out.shape[2]):
        out[to, head, i] = sums[row, i] * inverse
