"""Host memory for the KV blocks of preempted requests, and all block copies that come before a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from chairlift.attention.storage import KVStorage, as_plain
from chairlift.core.plan import StepPlan

_PROBE_BLOCKS = 32  # copied to measure the speed


class HostBlocks:
    """Slots of the size of a block in host memory. On a CPU a swap is a copy within the same memory."""

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self.num_slots = num_slots
        pinned = storage.keys[0].is_cuda  # twice as fast to copy from and to a GPU
        self._pairs = [
            (tensor, torch.empty((num_slots, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned))
            for tensor in map(as_plain, storage.tensors)
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
        """Measure the speed of copies to the host and back, before any block is in use."""
        device, host = self._pairs[0]
        count = min(_PROBE_BLOCKS, len(host), len(device) - 1)
        blocks = list(range(count))
        self.save(blocks, blocks)  # the first copy is slower than later ones
        begun = time.perf_counter()
        self.save(blocks, blocks)
        self.restore(blocks, blocks)
        if device.is_cuda:
            torch.cuda.synchronize(device.device)
        moved = sum(2 * count * pair[1][0].nbytes for pair in self._pairs)
        return moved / max(time.perf_counter() - begun, 1e-9)


def make_copies(plan: StepPlan, storage: KVStorage, host_blocks: HostBlocks | None) -> None:
    """Make a plan's swaps out, swaps in and block copies, in this order: each may read what the one before wrote."""
    if plan.swap_outs or plan.swap_ins:
        assert host_blocks is not None
        if plan.swap_outs:
            host_blocks.save([swap.block for swap in plan.swap_outs], [swap.slot for swap in plan.swap_outs])
        if plan.swap_ins:
            host_blocks.restore([swap.slot for swap in plan.swap_ins], [swap.block for swap in plan.swap_ins])
    copies = plan.copies
    if copies:
        storage.copy_blocks([copy.source for copy in copies], [copy.target for copy in copies])
