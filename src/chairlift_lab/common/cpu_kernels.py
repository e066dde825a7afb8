"""Kernels that measure a CPU with the engine's threads: its ceilings, and the attention of all layers in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from chairlift.kernels.cpu.attention import Cache, Score
from chairlift.kernels.cpu.attention_work import AttentionWork
from chairlift.kernels.cpu.compiling import FAST, compiled_and_kept
from chairlift.kernels.cpu.decoder import attend_layer
from chairlift.kernels.cpu.threads import barrier, claim, the_team
from chairlift.layers.formats import FORMATS
from chairlift.layers.linear import Linear
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.timing import best_seconds

READ_BYTES = 256 * 2**20  # far more than any cache holds
CHUNK = 2**15  # numbers that a thread takes at a time
ROWS, SIZE = 512, 1024  # Matrices large for a kernel, yet done within a time slice of the system.
_CPU = torch.device("cpu")


def cpu_ceilings(dtype: torch.dtype, quantization: str) -> Ceilings:
    """How fast all threads read memory, and multiply matrices in the precision of the model."""
    numbers = np.ones(READ_BYTES // 8, dtype=np.int64)
    sums = np.zeros(-(-len(numbers) // CHUNK), dtype=np.int64)
    reading = best_seconds(lambda: the_team().run(_add_up, numbers, sums), _CPU, least=0.5)
    assert sums.sum() == len(numbers)
    linear = Linear(torch.randn(SIZE, SIZE).to(dtype), format=FORMATS.get(quantization))
    linear.finalize()
    x = torch.randn(ROWS, SIZE).to(dtype)
    with torch.inference_mode():
        multiplying = best_seconds(lambda: linear(x), _CPU, least=0.5)
    return Ceilings(numbers.nbytes / reading, 2.0 * ROWS * SIZE**2 / multiplying)


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


@compiled_and_kept(FAST)
def attend_layers(
    shared: Any,
    members: int,
    q: Any,
    k: Any,
    v: Any,
    slots: Any,
    keys: Any,
    values: Any,
    tables: Any,
    work: AttentionWork,
    how: Score,
    out: Any,
) -> None:
    """The attention of all layers in one call, as in a step: a call from Python takes as long as a short context.

    Like `attend_layer`, for each layer of keys and values [layers, blocks, block_size, kv_heads, head_dim].
    """

    for layer in range(keys.shape[0]):
        cache = Cache(keys[layer], values[layer], tables)
        attend_layer(shared, members, q, k, v, slots, cache, work, how, out)
