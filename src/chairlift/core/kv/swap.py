"""Preemption that keeps what was computed: a victim's KV blocks wait in host memory until it is admitted again.

    step n      plan.swap_outs   device block 7 -> host slot 0     before anything else of the step
                                 device block 2 -> host slot 1
    step m      plan.swap_ins    host slot 1 -> device block 5     then these; position 0 was still in the prefix cache

This module decides which request holds which host slot; the executor makes the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import BlockSwap
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter

MODES = ("recompute", "swap", "auto")


class RecomputeCost(Protocol):
    def recompute_seconds(self, tokens: int) -> float:
        """The time to recompute this many tokens of one request."""
        ...


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Compares moving blocks to host memory and back, at a measured speed, with recomputing them."""

    bytes_per_block: int
    bytes_per_second: float
    recompute: RecomputeCost

    def swap_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        there_and_back = 2 * num_blocks * self.bytes_per_block / self.bytes_per_second
        return there_and_back < self.recompute.recompute_seconds(num_tokens)


class SwapSpace:
    """A bounded number of host slots, each as large as a block. Without any, every preemption recomputes."""

    def __init__(self, num_slots: int = 0, cost: SwapCost | None = None) -> None:
        self.num_slots = num_slots
        self.cost = cost  # None: swap whenever there are slots
        self._free = list(range(num_slots))
        self._slots: dict[str, list[int]] = {}  # by request id: the slots of its first blocks
        self._emptied: list[int] = []  # read by the step being planned: not to be written by the same step

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._emptied)

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(slots) for request_id, slots in self._slots.items()}

    def holds(self, request: Request) -> bool:
        return request.id in self._slots

    def begin_step(self) -> None:
        """Steps run in order, so what the last one reads may be written by this one."""
        self._free += self._emptied
        self._emptied = []

    def take_out(self, request: Request, kv: KVCache) -> list[BlockSwap] | None:
        """Take slots for the computed tokens of `request`; None (and no change) if it should recompute instead."""
        blocks = kv.table(request)[: kv.blocks_for(request.num_computed)]
        if not blocks or len(blocks) > len(self._free):
            return None
        if self.cost is not None and not self.cost.swap_is_cheaper(len(blocks), request.num_computed):
            return None
        slots = [self._free.pop() for _ in blocks]
        self._slots[request.id] = slots
        return [BlockSwap(request, block, slot) for block, slot in zip(blocks, slots, strict=True)]

    def bring_back(self, request: Request, blocks: Sequence[int]) -> list[BlockSwap]:
        """Plan copies into `blocks`, the last ones in the table of `request`; the others came from the prefix cache.
        Its slots are free again once this step is planned."""
        slots = self._slots.pop(request.id)
        self._emptied += slots
        wanted = slots[len(slots) - len(blocks) :]
        return [BlockSwap(request, block, slot) for block, slot in zip(blocks, wanted, strict=True)]

    def release(self, request: Request) -> None:
        """Free the slots of `request`."""
        self._emptied += self._slots.pop(request.id, [])


def check_mode(mode: str, swap_memory: object) -> None:
    if mode not in MODES:
        raise InvalidParameter("preemption", f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if mode == "recompute" and swap_memory is not None:
        raise InvalidParameter("swap_memory", "only goes with preemption swap or auto")
