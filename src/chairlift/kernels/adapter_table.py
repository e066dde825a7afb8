"""Where the matrices of an adapter lie, as kernels of CPUs and GPUs read it: one entry of integers for each product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

MAX_PARTS = 4  # parts of one product that a checkpoint names apart, such as queries, keys and values
A, RANK, IS_HALF, NUM_PARTS, PARTS = range(5)  # the columns of an entry: address, ranks of all parts, bfloat16, …
FIRST, SIZE, PART_RANK, B = range(4)  # Each part has its output channels, its rank and its address.
WIDTH = PARTS + 4 * MAX_PARTS


def entry(a: Tensor, parts: Sequence[tuple[int, Tensor]]) -> list[int]:
    """The entry of a first matrix [ranks, in] and of the second ones [rank, channels], each with its first channel."""
    assert len(parts) <= MAX_PARTS
    numbers = [a.data_ptr(), len(a), a.itemsize == 2, len(parts)]
    for first, b in parts:
        assert b.dtype is a.dtype
        numbers += [first, b.shape[1], len(b), b.data_ptr()]
    return [*map(int, numbers), *[0] * (WIDTH - len(numbers))]
