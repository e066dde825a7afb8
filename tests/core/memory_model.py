"""Device and host memory as dictionaries, to check the copies and writes of plans."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.kv.windowed_cache import FULL, Reach
from chairlift.core.plan import StepPlan

Content = tuple[str, tuple[int, ...]]
"""Stands for the key and value of a token, which depend on the salt and on all tokens up to it."""


class MemoryModel:
    """Runs plans like an executor (swap-outs, swap-ins, copies, then chunks) and checks what each chunk reads."""

    def __init__(self, block_size: int, reaches: Sequence[Reach] = (FULL,)) -> None:
        """`reaches`: those of the block tables."""
        self.block_size = block_size
        self.reaches = reaches
        self._device: dict[int, dict[int, tuple[int, Content]]] = {}  # by offset: the table's number, and the content
        self._host: dict[int, dict[int, tuple[int, Content]]] = {}
        self._states: dict[int, Content] = {}  # by slot: the state after all tokens up to some position

    def run(self, plan: StepPlan) -> None:
        for swap in plan.swap_outs:
            self._host[swap.slot] = dict(self._device.get(swap.block, {}))
        for swap in plan.swap_ins:
            self._device[swap.block] = dict(self._host.get(swap.slot, {}))
        sources = [dict(self._device.get(copy.source, {})) for copy in plan.copies]
        for copy, content in zip(plan.copies, sources, strict=True):
            self._device[copy.target] = content
        self.run_states(plan)
        for chunk in plan.chunks:
            tokens = (*chunk.request.tokens[: chunk.known_end], *chunk.drafts)
            for number, (table, reach) in enumerate(zip((chunk.table, *chunk.beside), self.reaches, strict=True)):
                for position in range(reach.first_seen(chunk.start), chunk.end):
                    block, offset = table[position // self.block_size], position % self.block_size
                    content = number, (chunk.request.salt, tokens[: position + 1])
                    if position >= chunk.start:
                        self._device.setdefault(block, {})[offset] = content
                    else:
                        found = self._device.get(block, {}).get(offset)
                        assert found == content, f"{chunk.request.id} reads something else at position {position}"

    def run_states(self, plan: StepPlan) -> None:
        """Check the states that chunks continue from, then write those after their rows."""
        written: dict[int, Content] = {}
        for chunk, states in zip(plan.chunks if plan.states else (), plan.states, strict=True):
            request, tokens = chunk.request, (*chunk.request.tokens[: chunk.known_end], *chunk.drafts)
            if chunk.start:
                expected = (request.salt, tokens[: chunk.start])
                assert self._states.get(states.read) == expected, f"{request.id} continues from another state"
            for row, slot in states.writes:
                written[slot] = (request.salt, tokens[: chunk.start + row + 1])
        self._states |= written
