"""How much memory the KV cache gets, with the arithmetic laid open."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from chairlift.attention import AttentionLayer, KVStorage
from chairlift.byte_sizes import format_bytes, parse_bytes
from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu.aligned import aligned

SHARE_OF_FREE_MEMORY = {"cpu": 0.25, "cuda": 0.9}
SHORT_SEQUENCE = 64  # tokens, prompt and output: hardly anybody asks for less
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weight_bytes: int
    bytes_per_token: int  # keys and values of one token in all layers
    block_size: int
    num_blocks: int
    max_model_len: int
    source: str  # where the amount came from

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def seats(self, most: int) -> int:
        """`most`, or fewer where that many sequences would not even get a few tokens each: a seat without memory is no
        use. How many are really taken depends on their lengths, and is decided when they board."""
        return max(1, min(most, self.num_tokens // SHORT_SEQUENCE))

    def lines(self) -> list[str]:
        """The arithmetic, for the start-up log."""
        sequences = self.num_tokens / self.max_model_len
        block_bytes = self.bytes_per_token * self.block_size
        return [
            f"weights    {format_bytes(self.weight_bytes)}",
            f"KV cache   {format_bytes(self.kv_bytes)} ({self.source})",
            f"           {self.bytes_per_token:,} bytes per token x {self.block_size} tokens per block"
            f" = {format_bytes(block_bytes)} per block",
            f"           {self.num_blocks:,} blocks = {self.num_tokens:,} tokens"
            f" = {sequences:.1f} sequences of the full {self.max_model_len:,} tokens",
        ]


def plan_memory(
    layers: Sequence[AttentionLayer],
    *,
    weight_bytes: int,
    kv_memory: int | str | None,
    memory_share: float | None = None,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    max_batch_requests: int,
    step_bytes: int = 0,
) -> MemoryPlan:
    """`kv_memory` as given, or a share of what is free beside `step_bytes`, but no more than all seats could fill."""
    per_token = bytes_per_token(layers, dtype)
    per_block = per_token * block_size
    free = free_memory(device) - step_bytes
    if kv_memory is not None:
        budget, source = parse_bytes("kv_memory", kv_memory), "kv_memory"
        if step_bytes and budget > free:
            problem = f"{format_bytes(budget)} is more than the {format_bytes(max(0, free))} that are free beside"
            problem = f"{problem} {format_bytes(step_bytes)} for the largest step; lower it, or max_batch_tokens"
            raise InvalidParameter("kv_memory", problem)
    else:
        share = memory_share or SHARE_OF_FREE_MEMORY[device.type]
        beside = f" beside {format_bytes(step_bytes)} for the largest step" if step_bytes else ""
        budget, source = max(0, int(free * share)), f"{share:.0%} of free memory{beside}"
    num_blocks = budget // per_block
    most = max_batch_requests * -(-max_model_len // block_size)
    if kv_memory is None and num_blocks > most:
        num_blocks, source = most, f"enough for all {max_batch_requests} seats"
    if num_blocks < 1:
        needed = f"one block of {block_size} tokens takes {format_bytes(per_block)}"
        raise InvalidParameter("kv_memory", f"{format_bytes(budget)} is too little: {needed}")
    return MemoryPlan(weight_bytes, per_token, block_size, num_blocks, max_model_len, source)


def bytes_per_token(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


def allocate_storage(
    layers: Sequence[AttentionLayer], plan: MemoryPlan, dtype: torch.dtype, device: torch.device
) -> KVStorage:
    # One block more than the scheduler knows of: padding is written there.
    shapes = [(plan.num_blocks + 1, plan.block_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
    alike = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))  # draft layers may differ

    def one_side() -> tuple[torch.Tensor, list[torch.Tensor]]:
        stacked = _empty((alike, *shapes[0]), dtype, device)
        others = [_empty(shape, dtype, device) for shape in shapes[alike:]]
        return stacked, [*stacked.unbind(0), *others]

    (all_keys, keys), (all_values, values) = one_side(), one_side()
    return KVStorage(keys, values, (all_keys, all_values))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    room = torch.from_numpy(aligned((math.prod(shape) * dtype.itemsize,)))
    return room.view(dtype).view(shape)


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated on `device`, a container's limit included."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = _left_of_container_limit()
    return _available_to_machine() if left is None else min(_available_to_machine(), left)


def memory_taken(run: Callable[[], object], device: torch.device) -> int:
    """Bytes of a GPU that `run` takes at its peak beyond what is in use, as torch asks the driver for them: with what
    lies unused between tensors. All is free again afterwards. Of a CPU, whose system lends more than there is: 0."""
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before


def _available_to_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            return int(found[1]) * 1024
    # Without a better source (macOS has none in the standard library), count half of what is installed.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_of_container_limit() -> int | None:
    limit = _cgroup_text("memory.max").strip()
    if not limit.isdigit():
        return None
    used = int(_cgroup_text("memory.current") or 0)
    # Files that were read, such as the model's, count as used until someone needs the memory.
    reclaimable = re.search(r"^inactive_file (\d+)$", _cgroup_text("memory.stat"), re.MULTILINE)
    return max(0, int(limit) - used + int(reclaimable[1] if reclaimable else 0))


def _cgroup_text(name: str) -> str:
    path = CGROUP / name
    return path.read_text() if path.exists() else ""
