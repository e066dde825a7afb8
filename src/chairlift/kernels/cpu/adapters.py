"""Low-rank terms of products: each row of a step may have its own adapters, or several with weights.

The rows of a step are grouped by adapter once, and each adapter's matrices are read once for all rows of a group: first
the rows are shrunk to the rank, then expanded and added to the product. A row's result depends on nothing else in the
step. All matrices of an adapter lie in one piece of memory in the order in which they are read, as panels of 16
columns; a table has their addresses by adapter slot and product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.kernels.adapter_table import FIRST, IS_HALF, NUM_PARTS, PART_RANK, PARTS, RANK, SIZE, WIDTH, A, B
from chairlift.kernels.cpu.compiling import FAST, borrowed, compiled, compiled_and_kept
from chairlift.kernels.cpu.simd import (
    F32,
    I64,
    LANES,
    PANEL,
    load,
    load_numbers,
    multiply_add,
    prefetch_line,
    splat,
    store,
)
from chairlift.kernels.cpu.threads import barrier, claim

MOST_ROWS = 32  # A group has at most these: so many stay in the cache while the matrices are read.
TILE_ROWS = 4  # rows that are multiplied at once
FEW_ITEMS = 32  # Fewer groups than this are divided, so that all threads have work.
AHEAD = 2048  # bytes that are prefetched before they are read


class Groups(NamedTuple):
    """Rows with the same adapter. A row with several adapters is in several groups, one in each round."""

    slots: np.ndarray  # [G] int64: the adapter slot of each group
    starts: np.ndarray  # [G + 1] int64: its first member
    rounds: np.ndarray  # [K + 1] int64: the first group of each round
    rows: np.ndarray  # [N] int64 of each member: its row of the step
    places: np.ndarray  # [N] int64: its row of the product
    members: np.ndarray  # [N] int64: its number
    weights: np.ndarray  # [N] float32: the factor of its term


class Terms(NamedTuple):
    """The adapters in memory and the rows of a step that have them. No groups: no row has any."""

    table: np.ndarray  # [slots, products, WIDTH] int64
    groups: Groups  # The groups of all rows.
    picked: Groups  # The groups of the only rows that are computed behind the last attention.
    shrunk: np.ndarray  # [2, N, most ranks of a product] float32; parallel blocks need both halves at the same time


def group_rows(slots: np.ndarray, weights: np.ndarray, picked: np.ndarray | None = None) -> Groups:
    """Group rows, whose adapters are slots [T, K] (-1: none) with weights [T, K]; only those that are `picked`."""
    rows = np.arange(len(slots)) if picked is None else picked.astype(np.int64)
    rounds, places = np.nonzero(slots[rows].T >= 0)
    keys = rounds * (slots.max(initial=0) + 1) + slots[rows[places], rounds]
    order = np.argsort(keys, kind="stable")
    rounds, places, keys = rounds[order], places[order], keys[order]
    most = min(MOST_ROWS, max(TILE_ROWS, len(keys) // 4))
    ends = [*np.flatnonzero(np.diff(keys, append=-1)) + 1]  # behind the members of each key
    firsts = [0, *ends][: len(ends)]
    starts = np.array(
        [start for first, end in zip(firsts, ends, strict=True) for start in range(first, end, most)], dtype=np.int64
    )
    first_rows = rows[places]
    return Groups(
        slots[first_rows[starts], rounds[starts]].astype(np.int64),
        np.append(starts, len(keys)),
        np.searchsorted(rounds[starts], np.arange(slots.shape[1] + 1)),
        first_rows,
        places,
        np.arange(len(keys)),
        weights[first_rows, rounds].astype(np.float32),
    )


_NO_GROUPS = group_rows(np.empty((0, 1), dtype=np.int32), np.empty((0, 1), dtype=np.float32))
NO_TERMS = Terms(np.empty((0, 0, WIDTH), dtype=np.int64), _NO_GROUPS, _NO_GROUPS, np.empty((2, 0, 0), dtype=np.float32))


def put_panels(target: np.ndarray, matrix: np.ndarray) -> None:
    """Write a matrix [depth, columns] to memory [padded columns * depth], panel by panel."""
    depth, columns = matrix.shape
    panels = target.reshape(-1, depth, PANEL)
    panels[...] = 0
    for panel in range(len(panels)):
        part = matrix[:, panel * PANEL : min(columns, (panel + 1) * PANEL)]
        panels[panel, :, : part.shape[1]] = part


def _panel_tile(rows: int) -> Any:
    """Build a function for target [rows, PANEL] = (or +=) left [rows, depth] times a panel [depth, PANEL] of the type
    of `like`. The rows of both sides are those at given places; strides are in bytes. A sum has the same order for any
    number of rows."""
    chains = 4 if LANES == 16 else 1  # sums of a row that are kept apart, as many as there are registers for
    numbers = ir.VectorType(F32, PANEL)

    @intrinsic
    def tile(
        _: Any,
        target: Any,
        target_stride: Any,
        target_places: Any,
        left: Any,
        left_stride: Any,
        left_places: Any,
        panel: Any,
        depth: Any,
        adding: Any,
        like: Any,
    ) -> Any:
        size = like.bitwidth // 8

        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
            target, target_stride, target_places, left, left_stride, left_places, panel, depth, adding, _like = args
            fused, nothing = multiply_add(b, PANEL), ir.Constant(numbers, None)

            def at(base: ir.Value, stride: ir.Value, places: ir.Value) -> list[ir.Value]:
                chosen = [load(b, b.add(places, I64(8 * row)), I64, 8) for row in range(rows)]
                return [b.add(base, b.mul(stride, place)) for place in chosen]

            lefts, targets = at(left, left_stride, left_places), at(target, target_stride, target_places)
            totals = [[cgutils.alloca_once_value(b, nothing) for _ in range(chains)] for _ in range(rows)]
            for total in (total for own in totals for total in own):
                b.store(nothing, total)

            def add(index: ir.Value, chain: int) -> None:
                address = b.add(panel, b.mul(index, I64(PANEL * size)))
                column, offset = load_numbers(b, address, size), b.mul(index, I64(4))
                if chain * PANEL * size % 64 == 0:
                    prefetch_line(b, b.add(address, I64(AHEAD)))
                for start, own in zip(lefts, totals, strict=True):
                    number = splat(b, load(b, b.add(start, offset), F32, 4), PANEL)
                    b.store(b.call(fused, [number, column, b.load(own[chain])]), own[chain])

            with cgutils.for_range(b, b.udiv(depth, I64(chains))) as loop:
                for chain in range(chains):
                    add(b.add(b.mul(loop.index, I64(chains)), I64(chain)), chain)
            whole = b.mul(b.udiv(depth, I64(chains)), I64(chains))
            with cgutils.for_range(b, b.urem(depth, I64(chains))) as loop:
                add(b.add(whole, loop.index), 0)
            sums = []
            for own in totals:
                parts = [b.load(total) for total in own]
                while len(parts) > 1:
                    parts = [b.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
                sums.append(parts[0])
            with b.if_else(adding) as (add_up, replace):
                with add_up:
                    for total, place in zip(sums, targets, strict=True):
                        store(b, b.fadd(load(b, place, numbers, 4), total), place, 4)
                with replace:
                    for total, place in zip(sums, targets, strict=True):
                        store(b, total, place, 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, types.boolean, like), generate

    return tile


_tile_4, _tile_2, _tile_1 = (_panel_tile(rows) for rows in (TILE_ROWS, 2, 1))


@compiled()
def _multiply(
    target: int,
    target_stride: int,
    target_places: int,
    left: int,
    left_stride: int,
    left_places: int,
    count: int,
    panel: int,
    depth: int,
    adding: bool,
    like: Any,
) -> None:
    """Multiply `count` rows by a panel; all numbers are addresses or bytes."""
    while count > 0:
        done = 4 if count >= 4 else 2 if count >= 2 else 1
        if done == 4:
            _tile_4(target, target_stride, target_places, left, left_stride, left_places, panel, depth, adding, like)
        elif done == 2:
            _tile_2(target, target_stride, target_places, left, left_stride, left_places, panel, depth, adding, like)
        else:
            _tile_1(target, target_stride, target_places, left, left_stride, left_places, panel, depth, adding, like)
        count, target_places, left_places = count - done, target_places + 8 * done, left_places + 8 * done


@compiled()
def _pieces(groups: int) -> int:
    """How many pieces the columns of each group are divided into."""
    return max(1, FEW_ITEMS // groups)


@compiled(FAST)
def shrink(shared: Any, members: int, terms: Terms, groups: Groups, product: int, half: int, rows: Any, x: Any) -> None:
    """Multiply the inputs of a product by the first matrices of the rows' adapters, into a half of `shrunk`. `rows`
    [N]: where each member of the groups is in x [R, depth]. Ends with a barrier."""
    count = groups.slots.shape[0]
    if count == 0:
        return
    table, starts, numbers = borrowed(terms.table), borrowed(groups.starts), borrowed(groups.members)
    shrunk, weights, pieces = borrowed(terms.shrunk[half]), borrowed(groups.weights), _pieces(count)
    while True:
        item = claim(shared, 1)
        if item >= count * pieces:
            break
        group, piece = item // pieces, item % pieces
        slot, start, end, depth = groups.slots[group], starts[group], starts[group + 1], x.shape[1]
        panels = -(-table[slot, product, RANK] // PANEL)
        is_half, address = table[slot, product, IS_HALF] != 0, table[slot, product, A]
        to, of = numbers.ctypes.data + 8 * start, rows.ctypes.data + 8 * start
        for panel in range(panels * piece // pieces, panels * (piece + 1) // pieces):
            target, stride, left = shrunk.ctypes.data + 4 * PANEL * panel, 4 * shrunk.shape[1], x.ctypes.data
            if is_half:
                matrix, like = address + 2 * PANEL * depth * panel, np.uint16(0)
                _multiply(target, stride, to, left, x.strides[0], of, end - start, matrix, depth, False, like)
            else:
                matrix, word = address + 4 * PANEL * depth * panel, np.float32(0)
                _multiply(target, stride, to, left, x.strides[0], of, end - start, matrix, depth, False, word)
            for member in range(start, end):
                if weights[member] != 1:
                    for rank in range(PANEL * panel, PANEL * (panel + 1)):
                        shrunk[member, rank] *= weights[member]
    barrier(shared, members)


@compiled(FAST)
def expand(shared: Any, members: int, terms: Terms, groups: Groups, product: int, half: int, out: Any) -> None:
    """Add the terms of the rows' adapters to their product [R, channels]; `shrink` came before. Ends with a barrier."""
    if groups.slots.shape[0] == 0:
        return
    sums = np.empty((1, PANEL), dtype=np.float32)
    for turn in range(groups.rounds.shape[0] - 1):
        first, count = groups.rounds[turn], groups.rounds[turn + 1] - groups.rounds[turn]
        pieces = _pieces(max(1, count))
        while True:
            item = claim(shared, 1)
            if item >= count * pieces:
                break
            _expand_piece(terms, groups, first + item // pieces, product, half, item % pieces, pieces, out, sums)
        barrier(shared, members)


@compiled(FAST)
def _expand_piece(
    terms: Terms, groups: Groups, group: int, product: int, half: int, piece: int, pieces: int, out: Any, sums: Any
) -> None:
    table, starts, shrunk = borrowed(terms.table), borrowed(groups.starts), borrowed(terms.shrunk[half])
    slot, start, end = groups.slots[group], starts[group], starts[group + 1]
    is_half, panels = table[slot, product, IS_HALF] != 0, 0
    for part in range(table[slot, product, NUM_PARTS]):
        panels += -(-table[slot, product, PARTS + 4 * part + SIZE] // PANEL)
    begin, last, rank = panels * piece // pieces, panels * (piece + 1) // pieces, 0
    numbers, places = groups.members.ctypes.data + 8 * start, groups.places.ctypes.data + 8 * start
    stride, out_stride = 4 * shrunk.shape[1], out.strides[0]
    for part in range(table[slot, product, NUM_PARTS]):
        column = PARTS + 4 * part
        depth, size = table[slot, product, column + PART_RANK], table[slot, product, column + SIZE]
        address, channel = table[slot, product, column + B], table[slot, product, column + FIRST]
        own = -(-size // PANEL)
        left = shrunk.ctypes.data + 4 * rank
        for panel in range(max(begin, 0), min(last, own)):
            target, width = out.ctypes.data + 4 * (channel + PANEL * panel), min(PANEL, size - PANEL * panel)
            half_matrix, matrix = address + 2 * PANEL * depth * panel, address + 4 * PANEL * depth * panel
            if width == PANEL and is_half:
                like = np.uint16(0)
                _multiply(
                    target, out_stride, places, left, stride, numbers, end - start, half_matrix, depth, True, like
                )
            elif width == PANEL:
                word = np.float32(0)
                _multiply(target, out_stride, places, left, stride, numbers, end - start, matrix, depth, True, word)
            else:
                for member in range(start, end):
                    one, to = left + member * stride, sums.ctypes.data
                    zero = groups.members.ctypes.data
                    if is_half:
                        _tile_1(to, 0, zero, one, 0, zero, half_matrix, depth, False, np.uint16(0))
                    else:
                        _tile_1(to, 0, zero, one, 0, zero, matrix, depth, False, np.float32(0))
                    for i in range(width):
                        out[groups.places[member], channel + PANEL * panel + i] += sums[0, i]
        begin, last, rank = begin - own, last - own, rank + depth


@compiled_and_kept(FAST)
def add_terms(shared: Any, members: int, terms: Terms, groups: Groups, product: int, x: Any, out: Any) -> None:
    """Add the terms of a product to out [R, channels], whose inputs are x [R, depth]."""
    shrink(shared, members, terms, groups, product, 0, groups.places, x)
    expand(shared, members, terms, groups, product, 0, out)
