"""What the choice of a kernel needs to know about a GPU, which need not be here, and the start of its libraries.

Tensors on torch's `meta` device have shapes but no memory. While a GPU is described (`described_gpu`), the meta device
stands for it: a step on such tensors shows which kernels it would launch there (`chairlift compile`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


log = logging.getLogger("chairlift")

_SIDE = 64  # The matrices that are multiplied have this many rows and columns.


class GPUStart:
    """Starts cuBLAS and hashes Triton for `device`; on a CPU nothing is done."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._threads: list[threading.Thread] = []
        if device.type != "cuda":
            return
        with suppress(ImportError):  # reported where a kernel is needed
            import triton  # noqa: F401  (not in the thread: half of it would be visible to this one)

            self._begin(lambda: _hash_triton(device))
        self._begin(lambda: _start_cublas(device, dtype))

    def _begin(self, part: Callable[[], None]) -> None:
        # Not a daemon: a process that ends early, because of its options, must not leave while a driver starts.
        self._threads.append(threading.Thread(target=_attempt, args=(part,)))
        self._threads[-1].start()

    def wait(self) -> None:
        """Wait until it is done: a step that begins before would do it once more."""
        for thread in self._threads:
            thread.join()


@cache
def start_libraries(device: torch.device, dtype: torch.dtype) -> GPUStart:
    """Start them once; later calls return what the first one has begun."""
    return GPUStart(device, dtype)


def _attempt(part: Callable[[], None]) -> None:
    try:
        part()
    except Exception as error:  # the first step raises it, too
        log.debug(f"a GPU library could not be started beside the weights: {error}")


def _hash_triton(device: torch.device) -> None:
    """Compute what all keys of Triton's cache begin with: a hash of its 0.4 GB, and the version of its assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    from chairlift.kernels.compilation.spec import WARP_SIZE

    triton_key()
    major, minor = torch.cuda.get_device_capability(device)
    make_backend(GPUTarget("cuda", 10 * major + minor, WARP_SIZE)).hash()


def _start_cublas(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply once: torch keeps the library's handle for the next thread that needs one."""
    with torch.inference_mode():
        matrix = torch.zeros(_SIDE, _SIDE, dtype=dtype, device=device)
        torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)
