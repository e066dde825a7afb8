"""Allocates large aligned arrays on a CPU."""

from __future__ import annotations

import numpy as np

LINE = 64  # bytes of a cache line


def aligned(shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """Return an uninitialised array that starts on a cache line.

    Allocated by numpy, because it requests huge pages: scattered reads then miss the TLB less often.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)
