"""The bandwidth and arithmetic of this CPU with the threads that the engine uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from chairlift.kernels.cpu.kept_kernels import compiled_and_kept
from chairlift.kernels.cpu.scalar_math import FAST
from chairlift.kernels.cpu.threads import barrier, claim, the_team
from chairlift.layers.formats import FORMATS
from chairlift.layers.linear import Linear
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.timing import best_seconds

READ_BYTES = 256 * 2**20  # far more than any cache holds
CHUNK = 2**15  # numbers that a thread takes at a time
ROWS, SIZE = 512, 1024  # of the matrices: large for a kernel, yet done within a time slice of the system
_CPU = torch.device("cpu")


def cpu_ceilings(dtype: torch.dtype, quantization: str) -> Ceilings:
    """Ceilings with matrix products in the precision of the model."""
    return Ceilings(read_bytes_per_second(), product_flops_per_second(dtype, quantization))


def read_bytes_per_second(num_bytes: int = READ_BYTES) -> float:
    numbers = np.ones(num_bytes // 8, dtype=np.int64)
    sums = np.zeros(-(-len(numbers) // CHUNK), dtype=np.int64)
    seconds = best_seconds(lambda: the_team().run(_add_up, numbers, sums), _CPU, least=0.5)
    assert sums.sum() == len(numbers)
    return numbers.nbytes / seconds


def product_flops_per_second(dtype: torch.dtype, quantization: str, rows: int = ROWS, size: int = SIZE) -> float:
    linear = Linear(torch.randn(size, size).to(dtype), format=FORMATS.get(quantization))
    linear.finalize()
    x = torch.randn(rows, size).to(dtype)
    with torch.inference_mode():
        return 2.0 * rows * size**2 / best_seconds(lambda: linear(x), _CPU, least=0.5)


@compiled_and_kept(FAST)
def _add_up(shared: Any, members: int, numbers: Any, sums: Any) -> None:
    """Write the sum of the i-th CHUNK numbers to sums[i]."""
    while True:
        first = claim(shared, CHUNK)
        if first >= numbers.shape[0]:
            break
        part = numbers[first : first + CHUNK]
        added = np.int64(0)
        for i in range(part.shape[0]):
            added += part[i]
        sums[first // CHUNK] = added
    barrier(shared, members)
