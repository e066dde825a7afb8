"""The memory of a runner: what a device has left, the cache's tensors, and host memory for preempted requests."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.placement import Placement
from chairlift.attention.recurrent import RecurrentLayer, StateStorage
from chairlift.attention.storage import KVStorage, as_plain, stored_size
from chairlift.core.plan import StepPlan
from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.gpu import gpu_of
from chairlift.machine.hardware import memory_left


def free_memory(device: torch.device, *, mapped: int = 0) -> int:
    """Bytes that could still be allocated on `device`, a container's limit included.

    `mapped` bytes of files are in use on a CPU, although the system could drop their pages.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "meta":
        gpu = gpu_of(device)
        return 0 if gpu is None else gpu.memory
    available, left = max(0, _available_to_machine() - mapped), memory_left(mapped=mapped)
    return available if left is None else min(available, left)


def _available_to_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if available:
            return int(available[1]) * 1024
    # Without a better source (macOS has none in the standard library), count half of what is installed.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def allocate_storage(
    layers: Sequence[AttentionLayer],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    placement: Placement | None = None,
) -> KVStorage:
    """Allocate `num_blocks` blocks and one more, to which padding is written: of each layer, or of each plane of a
    `placement` of the layers."""
    if placement is not None:
        planes = allocate_storage(placement.shapes, num_blocks, block_size, dtype, device)
        # Layers with a window may multiply what no request holds by zero, which must give zero.
        for side in map(as_plain, planes.tensors if device.type != "cpu" else ()):
            side.zero_()
        keys, values = ([side[plane] for plane in placement.planes] for side in (planes.keys, planes.values))
        places = tuple(zip(placement.planes, placement.tables, strict=True))
        return KVStorage(keys, values, planes.stacked, places)
    if not layers:  # a model without attention: a layer without numbers has the sizes that others read
        nothing = torch.empty((num_blocks + 1, block_size, 0, 0), dtype=dtype, device=device)
        return KVStorage([nothing], [nothing])
    shapes = [(num_blocks + 1, block_size, layer.num_kv_heads, stored_size(layer.head_dim, dtype)) for layer in layers]
    latent = [layer.latent_dim is not None for layer in layers]
    forms = list(zip(shapes, latent, strict=True))
    alike = next((i for i, form in enumerate(forms) if form != forms[0]), len(forms))  # draft layers may differ
    all_keys = _empty((alike, *shapes[0]), dtype, device)
    all_values = all_keys if latent[0] else _empty((alike, *shapes[0]), dtype, device)
    keys = [*all_keys.unbind(0), *(_empty(shape, dtype, device) for shape in shapes[alike:])]
    values = [
        *(keys[:alike] if latent[0] else all_values.unbind(0)),
        *(keys[i] if latent[i] else _empty(shapes[i], dtype, device) for i in range(alike, len(shapes))),
    ]
    return KVStorage(keys, values, (all_keys, all_values))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    room = torch.from_numpy(aligned((math.prod(shape) * dtype.itemsize,), zeros=True))
    return room.view(dtype).view(shape)


def allocate_states(layers: Sequence[RecurrentLayer], num_slots: int, device: torch.device) -> StateStorage | None:
    """Allocate `num_slots` slots, each of which is written before it is read; None without recurrent layers."""
    if not layers:
        return None
    return StateStorage(
        [
            {spec.name: torch.empty((num_slots, *spec.shape), dtype=spec.dtype, device=device) for spec in layer.states}
            for layer in sorted(layers, key=lambda layer: layer.index)
        ]
    )


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
        block, slot = self._indices(blocks, slots)
        for device, host in self._pairs:
            host.index_copy_(0, slot, device.index_select(0, block).to("cpu"))

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        block, slot = self._indices(blocks, slots)
        for device, host in self._pairs:
            device.index_copy_(0, block, host.index_select(0, slot).to(device.device))

    def _indices(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(blocks, device=self._pairs[0][0].device), torch.tensor(slots)

    @torch.inference_mode()
    def bytes_per_second(self) -> float:
        """Measure the speed of copies to the host and back, before any block is in use."""
        device, host = self._pairs[0]
        count = min(_PROBE_BLOCKS, len(host), len(device) - 1)
        blocks = list(range(count))
        self.save(blocks, blocks)  # the first copy is slower than later ones
        start = time.perf_counter()
        self.save(blocks, blocks)
        self.restore(blocks, blocks)
        if device.is_cuda:
            torch.cuda.synchronize(device.device)
        moved = sum(2 * count * pair[1][0].nbytes for pair in self._pairs)
        return moved / max(time.perf_counter() - start, 1e-9)


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
