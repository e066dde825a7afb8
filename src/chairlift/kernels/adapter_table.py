"""Where the matrices of an adapter lie, as kernels of CPUs and GPUs read it: one entry of integers for each product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

MAX_PARTS = 4  # parts of one product that a checkpoint names apart, such as queries, keys and values
A, RANK, IS_HALF, NUM_PARTS, PARTS = range(5)  # the columns of an entry: address, ranks of all parts, bfloat16, …
FIRST, SIZE, PART_RANK, B = range(4)  # Each part has its output channels, its rank and its address.
WIDTH = PARTS + 4 * MAX_PARTS
CPU_PANEL = 16  # columns of a matrix that lie together in memory of a CPU


def entry(a: Tensor, parts: Sequence[tuple[int, Tensor]]) -> list[int]:
    """The entry of a first matrix [ranks, in] and of the second ones [rank, channels], each with its first channel."""
    assert all(b.dtype is a.dtype for _, b in parts)
    second = [(first, b.shape[1], len(b), b.data_ptr()) for first, b in parts]
    return numbers_of(a.data_ptr(), len(a), a.itemsize == 2, second)


def numbers_of(address: int, ranks: int, is_half: bool, parts: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """The columns of an entry, whose parts have their first channel, channels, rank and address."""
    assert len(parts) <= MAX_PARTS
    numbers = [address, ranks, int(is_half), len(parts), *(number for part in parts for number in part)]
    return [*numbers, *[0] * (WIDTH - len(numbers))]


def padded(columns: int) -> int:
    """As many columns as the panels of a matrix have in memory of a CPU."""
    return -(-columns // CPU_PANEL) * CPU_PANEL
