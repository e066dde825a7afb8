"""Blocks that the target has begun to fill, and in which a draft head may never compute some tokens."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.plan import StepPlan

MANY = 64  # blocks beyond which only those of the requests at hand are cleared


class UnwrittenBlocks:
    """From which of its places on a block has to be cleared before the head reads it."""

    def __init__(self) -> None:
        self._first_place: dict[int, int] = {}  # by block

    def note(self, plan: StepPlan, block_size: int, *, computes_prompts: bool = False) -> None:
        """Note what a step begins. With `computes_prompts` the step has computed prompts for the head, too."""
        found = self._first_place
        for swap in plan.swap_ins:
            found.pop(swap.block, None)
        for chunk in plan.chunks:
            for copy in chunk.copies:
                found.pop(copy.target, None)
                if copy.source in found:
                    found[copy.target] = found[copy.source]
            start, end = chunk.start, chunk.start + chunk.count
            if chunk.count == 1 and start % block_size:  # most decodes
                continue
            if computes_prompts and not chunk.decodes:
                for block in chunk.table[start // block_size : -(-end // block_size)]:
                    found.pop(block, None)
                if end % block_size:
                    found[chunk.table[end // block_size]] = end % block_size
            else:
                found.update(dict.fromkeys(chunk.table[-(-start // block_size) : -(-end // block_size)], 0))

    def take(self, tables: Sequence[Sequence[int]], block_size: int) -> list[int]:
        """The slots (block * block_size + place) to clear in blocks of these tables, which then count as cleared."""
        found = self._first_place
        if not found:
            return []
        blocks = [*found] if len(found) <= MANY else [block for table in tables for block in table if block in found]
        return [
            slot
            for block in dict.fromkeys(blocks)
            for slot in range(block * block_size + found.pop(block), (block + 1) * block_size)
        ]
