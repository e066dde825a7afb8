"""Device and host memory as dictionaries, to check the copies and writes of plans."""

from __future__ import annotations

from chairlift.core.plan import StepPlan

Content = tuple[str, tuple[int, ...]]
"""Stands for the key and value of a token, which depend on the salt and on all tokens up to it."""


class MemoryModel:
    """Runs plans like an executor (swap-outs, swap-ins, copies, then chunks) and checks what each chunk reads."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._device: dict[int, dict[int, Content]] = {}
        self._host: dict[int, dict[int, Content]] = {}

    def run(self, plan: StepPlan) -> None:
        for swap in plan.swap_outs:
            self._host[swap.slot] = dict(self._device.get(swap.block, {}))
        for swap in plan.swap_ins:
            self._device[swap.block] = dict(self._host.get(swap.slot, {}))
        sources = [dict(self._device.get(copy.source, {})) for copy in plan.copies]
        for copy, content in zip(plan.copies, sources, strict=True):
            self._device[copy.target] = content
        for chunk in plan.chunks:
            tokens = (*chunk.request.tokens[: chunk.known_end], *chunk.drafts)
            for position in range(chunk.end):
                block, offset = chunk.table[position // self.block_size], position % self.block_size
                content = (chunk.request.salt, tokens[: position + 1])
                if position >= chunk.start:
                    self._device.setdefault(block, {})[offset] = content
                else:
                    found = self._device.get(block, {}).get(offset)
                    assert found == content, f"{chunk.request.id} reads something else at position {position}"
