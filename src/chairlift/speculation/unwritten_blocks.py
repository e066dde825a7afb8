"""Blocks that the target has begun to fill, and in which a draft head may never compute some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from chairlift.core.plan import StepPlan

MANY = 64  # blocks that are cleared at once beside those of the requests at hand


class UnwrittenBlocks:
    """From which of its places on a block has to be cleared before the head reads it."""

    def __init__(self) -> None:
        self._first_place: dict[int, int] = {}  # by block
        self._swapped: dict[int, int] = {}  # the same by slot in host memory

    def note(self, plan: StepPlan, block_size: int, *, computes_prompts: bool = False) -> None:
        """Note what a step begins. With `computes_prompts` the step has computed prompts for the head, too."""
        found = self._first_place
        for swap in plan.swap_outs:
            _copy(found, swap.block, self._swapped, swap.slot)
        for swap in plan.swap_ins:
            _copy(self._swapped, swap.slot, found, swap.block)
        for chunk in plan.chunks:
            for copy in chunk.copies:
                _copy(found, copy.source, found, copy.target)
            start, end = chunk.start, chunk.start + chunk.count
            is_computed = computes_prompts and not chunk.decodes
            if chunk.count == 1 and start % block_size and not is_computed:  # most decodes
                continue
            if is_computed:
                self._note_computed(chunk.table, start, end, block_size)
            else:
                found.update(dict.fromkeys(chunk.table[-(-start // block_size) : -(-end // block_size)], 0))

    def _note_computed(self, table: Sequence[int], start: int, end: int, block_size: int) -> None:
        """The head has computed the tokens from `start` to `end` of a request."""
        found, begun = self._first_place, table[start // block_size]
        before = found.get(begun, block_size)
        for block in table[start // block_size : -(-end // block_size)]:
            found.pop(block, None)
        if end % block_size:
            found[table[end // block_size]] = end % block_size
        if before < start % block_size:  # it has not computed some places before; those after them are cleared, too
            found[begun] = before

    def take(self, tables: Sequence[Sequence[int]], block_size: int) -> list[int]:
        """The slots (block * block_size + place) to clear in blocks of these tables, which then count as cleared."""
        found = self._first_place
        if not found:
            return []
        blocks = [*islice(found, MANY)]
        if len(found) > MANY:
            blocks += [block for block in chain.from_iterable(tables) if block in found]
        return [
            slot
            for block in dict.fromkeys(blocks)
            for slot in range(block * block_size + found.pop(block), (block + 1) * block_size)
        ]


def _copy(source: dict[int, int], at: int, target: dict[int, int], to: int) -> None:
    """Give a copied block the mark of its source."""
    target.pop(to, None)
    if at in source:
        target[to] = source[at]
