"""Large memory on a CPU, where the machine likes it."""

from __future__ import annotations

import numpy as np

LINE = 64  # bytes of a cache line


def aligned(shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """An array that is not filled and starts on a cache line, for what is read in whole vectors.

    From numpy, because it asks for huge pages: what is read here and there takes longer to find in small ones.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)
