"""What this CPU can do with the threads that the engine uses: read memory, and multiply large matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from chairlift.kernels.cpu.scalar_math import FAST, compiled_and_kept
from chairlift.kernels.cpu.threads import barrier, claim, the_team
from chairlift.lab.common.floor import Ceilings
from chairlift.lab.common.timing import best_seconds
from chairlift.layers.formats import FORMATS
from chairlift.layers.linear import Linear

READ_BYTES = 256 * 2**20  # far more than any cache holds
AT_ONCE = 2**15  # numbers that a thread takes at a time
ROWS, SIZE = 512, 1024  # of the matrices: large for a kernel, and done before the system looks for other work
_CPU = torch.device("cpu")


def cpu_ceilings(dtype: torch.dtype, quantization: str) -> Ceilings:
    """Products as the model makes them, in its precision."""
    return Ceilings(read_bytes_per_second(), product_flops_per_second(dtype, quantization))


def read_bytes_per_second(num_bytes: int = READ_BYTES) -> float:
    numbers = np.ones(num_bytes // 8, dtype=np.int64)
    sums = np.zeros(-(-len(numbers) // AT_ONCE), dtype=np.int64)
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
    """sums[i]: of the i-th AT_ONCE numbers."""
    while True:
        first = claim(shared, AT_ONCE)
        if first >= numbers.shape[0]:
            break
        part = numbers[first : first + AT_ONCE]
        added = np.int64(0)
        for i in range(part.shape[0]):
            added += part[i]
        sums[first // AT_ONCE] = added
    barrier(shared, members)
