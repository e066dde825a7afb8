"""What a GPU's libraries do once per process, in threads beside imports and the reading of the weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch

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


@torch.inference_mode()
def _start_cublas(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply once: torch keeps the library's handle for the next thread that needs one."""
    matrix = torch.zeros(_SIDE, _SIDE, dtype=dtype, device=device)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)
