"""Preemption by swapping: the KV blocks of a victim are kept in host memory until it is admitted again.

    step n      plan.swap_outs   device block 7 -> host slot 0     first in the step
                                 device block 2 -> host slot 1
    step m      plan.swap_ins    host slot 1 -> device block 5     next; position 0 was still in the prefix cache

This module assigns host slots to requests; the executor copies the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chairlift.core.kv.kv_cache import KVCache, Place
from chairlift.core.plan import BlockSwap
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter

MODES = ("recompute", "swap", "auto")


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Compares the cost of swapping blocks out and in, at a measured speed, with recomputing them."""

    bytes_per_block: int
    bytes_per_second: float
    recompute_seconds: Callable[[int], float]  # predicted, by the number of tokens of one request

    def swap_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        round_trip = 2 * num_blocks * self.bytes_per_block / self.bytes_per_second
        return round_trip < self.recompute_seconds(num_tokens)


class SwapSpace:
    """A fixed number of host slots, each as large as a block. Without slots, preempted requests recompute."""

    def __init__(self, num_slots: int = 0, cost: SwapCost | None = None) -> None:
        self.num_slots = num_slots
        self.cost = cost  # None: swap whenever there are slots
        self._free = list(range(num_slots))
        self._slots: dict[str, dict[Place, int]] = {}  # The slot of each block, by request id.
        self._freed: list[int] = []  # read by the step being planned, which must not write to them

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._freed)

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {request_id: tuple(slots.values()) for request_id, slots in self._slots.items()}

    def holds(self, request: Request) -> bool:
        return request.id in self._slots

    def begin_step(self) -> None:
        """Make the slots that the last step reads available: steps run in order."""
        self._free += self._freed
        self._freed = []

    def swap_out(self, request: Request, kv: KVCache) -> list[BlockSwap] | None:
        """Plan copies of the computed blocks of `request` to host slots; None (and no change) if it should
        recompute."""
        blocks = kv.computed(request)
        if not blocks or len(blocks) > len(self._free):
            return None
        if self.cost is not None and not self.cost.swap_is_cheaper(len(blocks), request.num_computed):
            return None
        slots = self._slots[request.id] = {place: self._free.pop() for place in blocks}
        return [BlockSwap(request, block, slots[place]) for place, block in blocks.items()]

    def swap_in(self, request: Request, blocks: Mapping[Place, int]) -> list[BlockSwap]:
        """Plan copies into `blocks`; others came from the prefix cache. All slots of `request` are free from the next
        step on."""
        slots = self._slots.pop(request.id)
        self._freed += slots.values()
        return [BlockSwap(request, block, slots[place]) for place, block in blocks.items()]

    def release(self, request: Request) -> None:
        """Free the slots of `request`."""
        self._freed += self._slots.pop(request.id, {}).values()


def check_mode(mode: str, swap_memory: object) -> None:
    if mode not in MODES:
        raise InvalidParameter("preemption", f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if mode == "recompute" and swap_memory is not None:
        raise InvalidParameter("swap_memory", "only goes with preemption swap or auto")
