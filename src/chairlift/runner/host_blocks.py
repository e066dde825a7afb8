"""Host memory for the KV blocks of preempted requests, and all copies of blocks that come before a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from chairlift.attention import KVStorage
from chairlift.attention.base import as_plain
from chairlift.byte_sizes import format_bytes, parse_bytes
from chairlift.core.plan import StepPlan
from chairlift.errors import InvalidParameter
from chairlift.runner.memory import MemoryPlan, free_memory

SHARE_OF_HOST_MEMORY = 0.25
_PROBE_BLOCKS = 32  # copied to measure the speed


class HostBlocks:
    """Slots as large as blocks. On a CPU this is memory like the cache's own, and a swap is a copy within it."""

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        pinned = storage.keys[0].is_cuda  # twice as fast to copy from and to a GPU
        self._pairs = [
            (tensor, torch.empty((num_slots, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned))
            for tensor in map(as_plain, (*storage.keys, *storage.values))
        ]

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for (device, host), block, slot in self._with_indices(blocks, slots):
            host.index_copy_(0, slot, device.index_select(0, block).to("cpu"))

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for (device, host), block, slot in self._with_indices(blocks, slots):
            device.index_copy_(0, block, host.index_select(0, slot).to(device.device))

    def _with_indices(
        self, blocks: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor, Tensor]]:
        block = torch.tensor(blocks, device=self._pairs[0][0].device)
        slot = torch.tensor(slots)
        return ((pair, block, slot) for pair in self._pairs)

    @torch.inference_mode()
    def bytes_per_second(self) -> float:
        """Measured before anyone has a block: some are copied to the host and back."""
        device, host = self._pairs[0]
        count = min(_PROBE_BLOCKS, len(host), len(device) - 1)
        blocks = list(range(count))
        self.save(blocks, blocks)  # the first time is not like the others
        begun = time.perf_counter()
        self.save(blocks, blocks)
        self.restore(blocks, blocks)
        if device.is_cuda:
            torch.cuda.synchronize(device.device)
        moved = sum(2 * count * pair[1][0].nbytes for pair in self._pairs)
        return moved / max(time.perf_counter() - begun, 1e-9)


def make_copies(plan: StepPlan, storage: KVStorage, host: HostBlocks | None) -> None:
    """In this order: a block that is saved may be filled from the host, and that one be written, in the same step."""
    if plan.swap_outs or plan.swap_ins:
        assert host is not None
        if plan.swap_outs:
            host.save([swap.block for swap in plan.swap_outs], [swap.slot for swap in plan.swap_outs])
        if plan.swap_ins:
            host.restore([swap.slot for swap in plan.swap_ins], [swap.block for swap in plan.swap_ins])
    copies = plan.copies
    if copies:
        storage.copy_blocks([copy.source for copy in copies], [copy.target for copy in copies])


def num_host_slots(swap_memory: int | str | None, plan: MemoryPlan) -> int:
    """As given, or as much as the KV cache itself, but at most a quarter of the free host memory."""
    per_block = plan.bytes_per_token * plan.block_size
    if swap_memory is None:
        return int(min(plan.kv_bytes, SHARE_OF_HOST_MEMORY * free_memory(torch.device("cpu")))) // per_block
    slots = parse_bytes("swap_memory", swap_memory) // per_block
    if not slots:
        raise InvalidParameter("swap_memory", f"is too little: one block takes {format_bytes(per_block)}")
    return slots
