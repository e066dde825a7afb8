"""Allocates large aligned arrays on a CPU."""

from __future__ import annotations

import numpy as np

LINE = 64  # bytes of a cache line


def aligned(shape: tuple[int, ...], dtype: type[np.generic] = np.uint8, *, zeros: bool = False) -> np.ndarray:
    """Return an array that starts on a cache line, uninitialised unless it is to have `zeros`.

    Allocated by numpy, because it requests huge pages: scattered reads then miss the TLB less often.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    # A large array of zeros takes no time: the system fills its pages when they are first used.
    memory = np.zeros(size + LINE, dtype=np.uint8) if zeros else np.empty(size + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)
