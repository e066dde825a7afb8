"""What the choice of a kernel needs to know about a GPU, which need not be in this machine.

Tensors on torch's `meta` device have shapes but no memory. While a GPU is described (`described_gpu`), the meta device
stands for it: a step on such tensors shows which kernels it would launch there (`chairlift compile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class GPU:
    """The facts that decide which kernels a step launches."""

    capability: tuple[int, int]
    shared_memory: int  # bytes that one program may use
    memory: int  # bytes

    @property
    def arch(self) -> int:
        """The compute capability as Triton writes it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]


KB, GB = 2**10, 2**30
GPUS = {
    "a100": GPU((8, 0), 163 * KB, 80 * GB),
    "a10": GPU((8, 6), 99 * KB, 24 * GB),
    "l4": GPU((8, 9), 99 * KB, 24 * GB),
    "l40s": GPU((8, 9), 99 * KB, 48 * GB),
    "h100": GPU((9, 0), 227 * KB, 80 * GB),
    "h200": GPU((9, 0), 227 * KB, 140 * GB),
}
META = torch.device("meta")
_described: list[GPU] = []  # the last one counts


def known_gpu(name: str) -> GPU:
    if name.lower() not in GPUS:
        raise InvalidParameter("device", f"{name!r} is not a GPU known by name; known are {', '.join(GPUS)}")
    return GPUS[name.lower()]


@contextmanager
def described_gpu(gpu: GPU) -> Iterator[None]:
    """Let the meta device stand for `gpu`."""
    _described.append(gpu)
    try:
        yield
    finally:
        _described.pop()


def on_gpu(device: torch.device) -> bool:
    """Whether steps on this device run Triton kernels."""
    return device.type == "cuda" or (device.type == "meta" and bool(_described))


def gpu_of(device: torch.device) -> GPU | None:
    """The GPU behind a device; None on a CPU, where kernels run in Triton's interpreter."""
    if device.type == "meta" and _described:
        return _described[-1]
    return _present_gpu(device) if device.type == "cuda" else None


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    if device.type == "meta":
        return _described[-1].capability
    return torch.cuda.get_device_capability(device)


@cache
def _present_gpu(device: torch.device) -> GPU:
    from triton.runtime import driver

    shared = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return GPU(capability_of(device), int(shared), torch.cuda.get_device_properties(device).total_memory)
