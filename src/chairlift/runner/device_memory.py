"""How much memory a device has left, and how much a computation takes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from chairlift.kernels.gpu import gpu_of
from chairlift.machine.cores import memory_left


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


def memory_taken(run: Callable[[], object], device: torch.device) -> int:
    """Bytes of GPU memory that `run` takes at its peak beyond what is in use, which are free again afterwards.

    Counted as torch asks the driver for them, with what lies unused between tensors. On a CPU, whose system lends more
    memory than there is, 0.
    """
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
