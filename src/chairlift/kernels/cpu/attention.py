"""Ragged paged attention for a team of threads: scores, softmax and sum in one pass over the KV blocks.

A few new tokens of a sequence are computed row by row, where reading the cache is the cost. More new tokens are
computed in tiles of queries and keys, where arithmetic is the cost and a loaded tile of keys serves all queries of the
tile. Both keep a running maximum and sum (as FlashAttention does), so no score matrix is stored. Each key and value is
loaded once for all query heads that share it.

A row has the same bits either way, whatever other rows there are: scores are summed in the order of a head's numbers,
values in the order of positions, each span of PIECE positions on its own, and spans are merged in their order. What
both ways compute is therefore compiled without leave to reorder sums.

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
from chairlift.kernels.cpu.attention_work import (
    PIECE,
    QUERIES,
    AttentionWork,
    Partial,
    Pieces,
    SharedPieces,
    Tiles,
)
from chairlift.kernels.cpu.compiling import FAST, borrowed, compiled, exp, from_sortable, sortable
from chairlift.kernels.cpu.simd import (
    F32_COLUMNS,
    F32_LANES,
    F32_ROWS,
    add_to_lanes,
    f32_tile,
    f32_tile_ahead,
    keys_tile,
    sum_of_lanes,
)
from chairlift.kernels.cpu.threads import claim

KEYS = F32_COLUMNS  # key positions of a tile
MOST_QUERIES = 8  # query heads whose scores are computed at a time: as many sums as leave registers for 16 keys
NOTHING = np.float32(-1e30)

_tile = f32_tile(F32_ROWS)
_add_6, _add_4, _add_3, _add_2, _add_1 = (f32_tile_ahead(rows) for rows in (F32_ROWS, 4, 3, 2, 1))
_keys_8, _keys_7, _keys_6, _keys_5 = (keys_tile(rows) for rows in (8, 7, 6, 5))
_keys_4, _keys_3, _keys_2, _keys_1 = (keys_tile(rows) for rows in (4, 3, 2, 1))
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
    """Scratch memory of one thread, float32 if nothing else is said. R: rows of a tile, one per token and head."""

    queries: np.ndarray  # [R, head_dim], scaled
    sums: np.ndarray  # [R, padded value_dim], of one span
    peaks: np.ndarray  # [R]
    totals: np.ndarray  # [R, F32_LANES], whose sum is the total
    merged: np.ndarray  # [R, padded value_dim], the same of all spans so far
    merged_peaks: np.ndarray  # [R]
    merged_totals: np.ndarray  # [R]
    scores: np.ndarray  # [MOST_QUERIES, KEYS]
    keys: np.ndarray  # [head_dim, KEYS]
    values: np.ndarray  # [KEYS, padded value_dim]
    scales: np.ndarray  # [2, KEYS] of 8-bit keys and values
    parts: np.ndarray  # [R, 2 * head_dim] uint8: queries split for keys of 8 bits
    part_scales: np.ndarray  # [R]
    rows: np.ndarray  # [QUERIES] int64: the rows of a tile's tokens
    positions: np.ndarray  # [QUERIES] int64: their positions, ascending


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
    how = Score(how.scale, how.window, how.softcap, how.chunk, borrowed(how.sinks))
    kv_heads, head_dim = cache.keys.shape[2], q.shape[2]
    group = q.shape[1] // kv_heads
    padded = (out.shape[2] + F32_COLUMNS - 1) // F32_COLUMNS * F32_COLUMNS
    shared_pieces, order = work.shared, borrowed(work.order)
    queries = QUERIES if tiles.rows.shape[0] + shared_pieces.counts.shape[0] > 0 else 1
    most = max(queries * group, q.shape[1]) + F32_ROWS  # a tile may extend past the last row
    scratch = _Scratch(
        np.zeros((most, head_dim), dtype=np.float32),
        np.zeros((most, padded), dtype=np.float32),
        np.zeros(most, dtype=np.float32),
        np.zeros((most, F32_LANES), dtype=np.float32),
        np.zeros((most, padded), dtype=np.float32),
        np.zeros(most, dtype=np.float32),
        np.zeros(most, dtype=np.float32),
        np.zeros((MOST_QUERIES, KEYS), dtype=np.float32),
        np.zeros((max(head_dim, KEYS), max(padded, KEYS)), dtype=np.float32),
        np.zeros((KEYS, padded), dtype=np.float32),
        np.zeros((2, KEYS), dtype=np.float32),
        np.zeros((most, 2 * head_dim), dtype=np.uint8),
        np.zeros(most, dtype=np.float32),
        np.zeros(QUERIES, dtype=np.int64),
        np.zeros(QUERIES, dtype=np.int64),
    )
    num_tiles = tiles.rows.shape[0] * kv_heads
    num_large = num_tiles + shared_pieces.counts.shape[0] * kv_heads
    num_pieces = order.shape[0]
    # Threads share the heads of a piece where there are too few pieces for all threads.
    shares = min(kv_heads, -(-members // max(1, num_pieces + num_large)))
    total = num_large + num_pieces * shares
    item = claim(shared, 1)
    while item < total:
        # Claim the next piece now, to prefetch its first keys; but leave the last ones to threads that are free. Tiles
        # and shared pieces are long, so that they are claimed one by one.
        following = claim(shared, 1) if num_large <= item and item + members < total else -1
        if item < num_tiles:  # tiles first, the last one first: it has the longest context
            _attend_tile(
                tiles.rows.shape[0] - 1 - item // kv_heads, item % kv_heads, q, cache, tiles, how, scratch, out
            )
        elif item < num_large:
            place, kv_head = (item - num_tiles) // kv_heads, (item - num_tiles) % kv_heads
            _attend_shared(place, kv_head, q, cache, shared_pieces, pieces, how, partial, scratch, out.shape[2])
        else:
            piece, share = order[(item - num_large) // shares], (item - num_large) % shares
            next_piece = order[(following - num_large) // shares] if num_large <= following < total else -1
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


@compiled()
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
    scores, keys, values, scales = scratch.scores, scratch.keys, scratch.values, scratch.scales
    parts, part_scales = scratch.parts, scratch.part_scales
    end = min(length, start + PIECE)
    low = _first_visible(length - 1, how.window, how.chunk)
    _load_queries(q, row, 0, heads, how.scale, queries, 0)
    _begin_rows(heads, sums, peaks, totals)
    in_place = cache.keys.shape[1] % TILE == 0 and q.shape[2] % TILE == 0  # keys need not be copied
    by_bytes = has_score_tile(cache.keys, queries) and in_place
    most_queries = MOST_QUERIES if in_place and not by_bytes and value_dim % F32_COLUMNS == 0 else F32_ROWS
    at_once = -(-group // -(-group // most_queries))  # query heads at a time: equally many
    if by_bytes:
        for head in range(first_kv_head * group, end_kv_head * group):
            split_query(cache.keys, queries, head, parts, part_scales)
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
            if not in_place:
                load_columns(cache.keys, cache.tables, sequence, base, count, kv_head, keys)
            for first in range(kv_head * group, (kv_head + 1) * group, at_once):
                last = min(first + at_once, (kv_head + 1) * group)
                ahead = next_end if first == kv_head * group else 0  # prefetch once for all query heads
                if in_place:
                    _score(
                        queries,
                        parts,
                        part_scales,
                        by_bytes,
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
                else:
                    _score_loaded(queries, first, keys, scores)
                if has_scales(cache.keys):
                    _scale_lines(scores, last - first, scales, 0)
                for head in range(first, last):
                    _soften(scores, head - first, peaks, totals, sums, head, max(low - base, 0), count, how.softcap)
                if has_scales(cache.values):
                    _scale_lines(scores, last - first, scales, 1)
                _clear_lines(scores, last - first)
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
            total = sum_of_lanes(totals.ctypes.data + head * F32_LANES * 4)
            _finish_row(sums, head, peaks[head], total, how.sinks, out, row, head)
        else:
            partial.peaks[piece, head] = peaks[head]
            partial.totals[piece, head] = sum_of_lanes(totals.ctypes.data + head * F32_LANES * 4)
            for i in range(value_dim):
                partial.sums[piece, head, i] = sums[head, i]


@compiled()
def _score(
    queries: Any,
    parts: Any,
    part_scales: Any,
    by_bytes: bool,
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
    """Compute rows of scores, the products of queries with keys in blocks of whole tiles, and prefetch the keys of the
    next tile. Scores behind the last position are not used."""
    like, size, head_dim, block_size = side[0, 0, 0, 0], side.itemsize, numbers_of(side), side.shape[1]
    stride = side.shape[2] * side.shape[3]
    query = queries.ctypes.data + first * head_dim * 4
    for j in range(0, count, TILE):
        block, slot = place_of(tables, sequence, base + j, block_size)
        keys = side.ctypes.data + ((block * block_size + slot) * stride + kv_head * side.shape[3]) * size
        ahead = distance_ahead(side, tables, block * block_size + slot, next_sequence, next_base + j, next_end)
        target = scores.ctypes.data + j * 4
        if by_bytes:
            score_keys(side, target, 4 * KEYS, parts, part_scales, first, last, keys, ahead)
        elif last - first == 1:
            _keys_1(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        elif last - first == 2:
            _keys_2(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        elif last - first == 3:
            _keys_3(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        elif last - first == 4:
            _keys_4(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        elif last - first == 5:
            _keys_5(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        elif last - first == 6:
            _keys_6(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        elif last - first == 7:
            _keys_7(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)
        else:
            _keys_8(target, KEYS, query, head_dim, keys, stride, head_dim, ahead, like)


@compiled()
def _score_loaded(queries: Any, first: int, keys: Any, scores: Any) -> None:
    """Compute F32_ROWS rows of scores from keys [head_dim, KEYS or more]."""
    head_dim = queries.shape[1]
    for line in range(F32_ROWS):
        for j in range(KEYS):
            scores[line, j] = np.float32(0.0)
    query = queries.ctypes.data + first * head_dim * 4
    _tile(scores.ctypes.data, KEYS, query, head_dim, keys.ctypes.data, keys.shape[1], head_dim, _F32)


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
    half = first + F32_ROWS if last - first <= F32_ROWS else (first + last + 1) // 2
    j = 0
    while j < count:
        block, slot = place_of(tables, sequence, base + j, block_size)
        run = min(block_size - slot, count - j)
        ahead = distance_ahead(side, tables, block * block_size + slot, next_sequence, next_base + j, next_end)
        place = (block * block_size + slot) * stride + kv_head * side.shape[3]
        for begin in range(first, last, half - first):
            rows, weights = min(half - first, last - begin), scores.ctypes.data + ((begin - first) * KEYS + j) * 4
            for column in range(0, padded, F32_COLUMNS):
                value = side.ctypes.data + (place + column) * size
                target = sums.ctypes.data + (begin * padded + column) * 4
                if rows == 1:
                    _add_1(target, padded, weights, KEYS, value, stride, run, ahead, like)
                elif rows == 2:
                    _add_2(target, padded, weights, KEYS, value, stride, run, ahead, like)
                elif rows == 3:
                    _add_3(target, padded, weights, KEYS, value, stride, run, ahead, like)
                elif rows == 4:
                    _add_4(target, padded, weights, KEYS, value, stride, run, ahead, like)
                else:
                    _add_6(target, padded, weights, KEYS, value, stride, run, ahead, like)
        j += run


@compiled()
def merge(row: int, work: AttentionWork, sinks: Any, merged: Any, out: Any) -> None:
    """Merge the pieces of a row into out [T, heads, value_dim], if it was computed in several. `merged` [1, value_dim]
    is memory for that."""
    first = work.several[row]
    if first < 0:
        return
    partial, last = _borrowed_partial(work.partial), first + work.pieces.counts[first]
    sums, peaks, totals = partial.sums, partial.peaks, partial.totals
    for head in range(out.shape[1]):
        peak, total = peaks[first, head], totals[first, head]
        for i in range(merged.shape[1]):
            merged[0, i] = sums[first, head, i]
        for piece in range(first + 1, last):
            kept, share = _shares(peak, peaks[piece, head])
            peak, total = max(peak, peaks[piece, head]), total * kept + totals[piece, head] * share
            for i in range(merged.shape[1]):
                merged[0, i] = merged[0, i] * kept + sums[piece, head, i] * share
        _finish_row(merged, 0, peak, total, sinks, out, row, head)


@compiled()
def _shares(peak: Any, next_peak: Any) -> Any:
    """What the sums of two spans are to be multiplied by."""
    highest = max(peak, next_peak)
    return exp(peak - highest), exp(next_peak - highest)


@compiled()
def _merge_sums(merged: Any, row: int, kept: Any, sums: Any, source: int, share: Any) -> None:
    for i in range(merged.shape[1]):
        merged[row, i] = merged[row, i] * kept + sums[source, i] * share


@compiled()
def _finish_row(sums: Any, row: int, peak: Any, total: Any, sinks: Any, out: Any, to: int, head: int) -> None:
    """Divide by the total, to which a sink adds its weight. It has no value."""
    share = np.float32(1.0)
    if sinks.shape[0] > 0:
        share, weight = _shares(peak, sinks[head])
        total = total * share + weight
    factor = share / total
    for i in range(out.shape[2]):
        out[to, head, i] = sums[row, i] * factor


@compiled()
def _attend_tile(
    tile: int, kv_head: int, q: Any, cache: Cache, tiles: Tiles, how: Score, scratch: Any, out: Any
) -> None:
    group = q.shape[1] // cache.keys.shape[2]
    first_row, tokens, position = tiles.rows[tile], tiles.counts[tile], tiles.positions[tile]
    rows, end, sequence, value_dim = tokens * group, position + tokens, tiles.sequences[tile], out.shape[2]
    token_rows, positions, totals = scratch.rows, scratch.positions, scratch.totals
    merged, merged_peaks, merged_totals = scratch.merged, scratch.merged_peaks, scratch.merged_totals
    for token in range(tokens):
        token_rows[token], positions[token] = first_row + token, position + token
    _load_tile(q, tokens, kv_head, group, cache, how, scratch)
    low = _first_visible(position, how.window, how.chunk) // KEYS * KEYS
    first_end = min((low // PIECE + 1) * PIECE, end)
    _attend_span(low, first_end, tokens, kv_head, group, cache, sequence, how, scratch, merged, merged_peaks, value_dim)
    for row in range(rows):
        merged_totals[row] = sum_of_lanes(totals.ctypes.data + row * F32_LANES * 4)
    sums, peaks = scratch.sums, scratch.peaks
    for start in range(first_end, end, PIECE):
        span_end = min(start + PIECE, end)
        _attend_span(start, span_end, tokens, kv_head, group, cache, sequence, how, scratch, sums, peaks, value_dim)
        for row in range(rows):
            kept, share = _shares(merged_peaks[row], peaks[row])
            total = sum_of_lanes(totals.ctypes.data + row * F32_LANES * 4)
            merged_totals[row] = merged_totals[row] * kept + total * share
            merged_peaks[row] = max(merged_peaks[row], peaks[row])
            _merge_sums(merged, row, kept, sums, row, share)
    sinks = how.sinks
    for row in range(rows):
        to, head = first_row + row // group, kv_head * group + row % group
        _finish_row(merged, row, merged_peaks[row], merged_totals[row], sinks, out, to, head)


@compiled()
def _attend_shared(
    place: int,
    kv_head: int,
    q: Any,
    cache: Cache,
    shared: SharedPieces,
    pieces: Pieces,
    how: Score,
    partial: Partial,
    scratch: Any,
    value_dim: int,
) -> None:
    """Compute a span that several rows have in common, as their pieces."""
    first, tokens, start, sequence = (
        shared.firsts[place],
        shared.counts[place],
        shared.starts[place],
        shared.sequences[place],
    )
    group = q.shape[1] // cache.keys.shape[2]
    own, token_rows, positions = shared.pieces, scratch.rows, scratch.positions
    for token in range(tokens):
        token_rows[token], positions[token] = pieces.rows[own[first + token]], pieces.lengths[own[first + token]] - 1
    _load_tile(q, tokens, kv_head, group, cache, how, scratch)
    low = _first_visible(positions[0], how.window, how.chunk) // KEYS * KEYS
    sums, peaks, totals = scratch.sums, scratch.peaks, scratch.totals
    end = start + PIECE
    _attend_span(max(start, low), end, tokens, kv_head, group, cache, sequence, how, scratch, sums, peaks, value_dim)
    for row in range(tokens * group):
        piece, head = own[first + row // group], kv_head * group + row % group
        partial.peaks[piece, head] = peaks[row]
        partial.totals[piece, head] = sum_of_lanes(totals.ctypes.data + row * F32_LANES * 4)
        for i in range(value_dim):
            partial.sums[piece, head, i] = sums[row, i]


@compiled()
def _load_tile(q: Any, tokens: int, kv_head: int, group: int, cache: Cache, how: Score, scratch: Any) -> None:
    """Load the queries of a tile's tokens."""
    for token in range(tokens):
        row = scratch.rows[token]
        _load_queries(q, row, kv_head * group, group, how.scale, scratch.queries, token * group)
    if has_score_tile(cache.keys, scratch.queries):
        for row in range(tokens * group):
            split_query(cache.keys, scratch.queries, row, scratch.parts, scratch.part_scales)


@compiled()
def _attend_span(
    start: int,
    end: int,
    tokens: int,
    kv_head: int,
    group: int,
    cache: Cache,
    sequence: int,
    how: Score,
    scratch: Any,
    sums: Any,
    peaks: Any,
    value_dim: int,
) -> None:
    """Compute the positions [start, end) for all rows of a tile, one for each token and query head."""
    queries, totals = scratch.queries, scratch.totals
    scores, keys, values, scales = scratch.scores, scratch.keys, scratch.values, scratch.scales
    rows, positions = tokens * group, scratch.positions
    by_bytes = has_score_tile(cache.keys, queries) and cache.keys.shape[1] % TILE == 0
    _begin_rows(rows, sums, peaks, totals)
    for base in range(start, end, KEYS):
        count = min(KEYS, end - base)
        if not by_bytes:
            load_columns(cache.keys, cache.tables, sequence, base, count, kv_head, keys)
        load_rows(cache.values, cache.tables, sequence, base, count, kv_head, value_dim, values)
        load_scales(cache.keys, cache.tables, sequence, base, count, kv_head, scales, 0)
        load_scales(cache.values, cache.tables, sequence, base, count, kv_head, scales, 1)
        for first in range(0, rows, F32_ROWS):
            last = min(first + F32_ROWS, rows)
            if base > positions[(last - 1) // group]:
                continue  # every key of the tile is after these rows
            if by_bytes:
                _score(
                    queries,
                    scratch.parts,
                    scratch.part_scales,
                    True,
                    first,
                    last,
                    cache.keys,
                    cache.tables,
                    sequence,
                    base,
                    count,
                    kv_head,
                    scores,
                    sequence,
                    base,
                    0,
                )
            else:
                _score_loaded(queries, first, keys, scores)
            if has_scales(cache.keys):
                _scale_lines(scores, last - first, scales, 0)
            for row in range(first, last):
                position = positions[row // group]
                low = _first_visible(position, how.window, how.chunk) - base
                _soften(
                    scores, row - first, peaks, totals, sums, row, low, min(position + 1 - base, count), how.softcap
                )
            if has_scales(cache.values):
                _scale_lines(scores, last - first, scales, 1)
            _clear_lines(scores, last - first)
            _add_values(sums, first, scores, values, count)


@compiled()
def _first_visible(position: int, window: int, chunk: int) -> int:
    """The first position that the token at `position` sees."""
    first = max(0, position - window + 1) if window > 0 else 0
    return max(first, position // chunk * chunk) if chunk > 0 else first


@compiled()
def _load_queries(q: Any, row: int, first: int, count: int, scale: Any, queries: Any, to: int) -> None:
    """Load `count` query heads of a row from `first` on into the lines from `to` on."""
    for head in range(count):
        for i in range(q.shape[2]):
            queries[to + head, i] = q[row, first + head, i] * scale


@compiled()
def _begin_rows(rows: int, sums: Any, peaks: Any, totals: Any) -> None:
    for row in range(rows):
        peaks[row] = NOTHING
        for lane in range(F32_LANES):
            totals[row, lane] = np.float32(0.0)
        for i in range(sums.shape[1]):
            sums[row, i] = np.float32(0.0)


@compiled()
def _scale_lines(scores: Any, lines: int, scales: Any, side: int) -> None:
    for line in range(lines):
        for j in range(KEYS):
            scores[line, j] *= scales[side, j]


@compiled()
def _clear_lines(scores: Any, lines: int) -> None:
    """Clear the lines behind the first ones: a tile adds all its lines."""
    for line in range(lines, scores.shape[0]):
        for j in range(KEYS):
            scores[line, j] = np.float32(0.0)


@compiled()
def _soften(
    scores: Any, line: int, peaks: Any, totals: Any, sums: Any, row: int, low: int, high: int, softcap: Any
) -> None:
    """Turn the scores in [low, high) of a row into softmax weights and rescale its earlier sums to the new maximum."""
    if softcap > 0:
        factor = np.float32(2.0) / softcap
        for j in range(KEYS):
            bent = exp(factor * scores[line, j])
            scores[line, j] = softcap * (np.float32(1.0) - np.float32(2.0) / (bent + np.float32(1.0)))
    for j in range(min(low, KEYS)):
        scores[line, j] = -np.inf
    for j in range(max(high, 0), KEYS):
        scores[line, j] = -np.inf
    highest = sortable(peaks[row])
    for j in range(KEYS):
        highest = np.int32(max(highest, sortable(scores[line, j])))
    peak = from_sortable(highest)
    for j in range(KEYS):
        scores[line, j] = exp(scores[line, j] - peak)
    shrink = exp(peaks[row] - peak)
    peaks[row] = peak
    add_to_lanes(totals.ctypes.data + row * F32_LANES * 4, shrink, scores.ctypes.data + line * KEYS * 4)
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
