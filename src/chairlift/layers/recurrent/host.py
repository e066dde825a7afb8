"""A batch of states as the CPU kernels read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.attention.recurrent import RecurrentBatch

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.recurrence import Sequences


def on_host(batch: RecurrentBatch) -> Sequences:
    from chairlift.kernels.cpu.recurrence import Sequences

    return Sequences(batch.starts.numpy(), batch.read.numpy(), batch.write.numpy())
