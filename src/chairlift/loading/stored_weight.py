"""Weights as quantized checkpoints store them, before a weight format computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

GROUP = 32  # 4-bit floats that share a scale


class StoredWeight(ABC):
    """A matrix [out_features, in_features] in the form of its checkpoint."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @abstractmethod
    def dequantized(self) -> Tensor:
        """The matrix in float32."""

    def select_rows(self, rows: Tensor) -> StoredWeight:
        """The matrix of these rows, in the same form if that is possible."""
        return PlainValues(self.dequantized()[rows])

    def matrices(self) -> Sequence[StoredWeight]:
        """The matrices of a stack [experts, out_features, in_features]; most weights are a single matrix."""
        return [self]

    def as_integers(self) -> GroupedIntegers | None:
        """The same numbers as integers with scales per group, if that is what they are."""
        return None

    def as_microscaled(self) -> MicroscaledFloats | None:
        """The same numbers as 4-bit floats with powers of two per group, if that is what they are."""
        return None

    @property
    def block_kind(self) -> str | None:
        """The kind of blocks in which a CPU may multiply the weight; None if it has to be rounded for that."""
        return None

    def block_rows(self) -> StoredBlocks:
        """The weight in blocks of its `block_kind`."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")


class StoredBlocks(NamedTuple):
    """Rows of blocks, as files of that kind have them."""

    rows: np.ndarray  # [stored rows, bytes]
    order: np.ndarray | None = None  # The weight has these of the stored rows; None: all


NamedWeights = Iterable[tuple[str, Tensor | StoredWeight]]
"""The weights of a checkpoint one by one, under its names for them."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers(StoredWeight):
    """Integers of 2 to 8 bits; each group of columns of a row has a scale, and an offset if it is not symmetric.

    A number n of a group stands for n * scale + offset; without offsets for (n - 2 ** (bits - 1)) * scale.
    """

    bits: int
    numbers: Tensor  # [out, in] uint8
    scales: Tensor  # [out, groups] floating
    offsets: Tensor | None = None  # [out, groups] float32
    group_of: Tensor | None = None  # [in]: the group of each column, if groups are not runs of neighbours

    def __post_init__(self) -> None:
        rows, columns = self.numbers.shape
        groups = self.scales.shape[1]
        if self.scales.shape != (rows, groups) or columns % groups:
            raise ValueError(f"scales {list(self.scales.shape)} for the numbers {[rows, columns]}")
        if self.offsets is not None and self.offsets.shape != self.scales.shape:
            raise ValueError(f"zero points {list(self.offsets.shape)} for the scales {list(self.scales.shape)}")
        of = self.group_of
        if of is not None and (of.shape != (columns,) or not 0 <= int(of.min()) <= int(of.max()) < groups):
            raise ValueError(f"the groups of {columns} columns must be from 0 to {groups - 1}")

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def as_integers(self) -> GroupedIntegers:
        return self

    def select_rows(self, rows: Tensor) -> GroupedIntegers:
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], offsets=offsets)

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        groups = self.group_of
        if groups is None:
            groups = torch.arange(self.shape[1], device=self.numbers.device) // self.group_size
        groups = groups.long()
        scales = self.scales.float()
        offsets = -(2.0 ** (self.bits - 1)) * scales if self.offsets is None else self.offsets
        return torch.addcmul(offsets[:, groups], self.numbers.float(), scales[:, groups])


@dataclass(frozen=True, slots=True)
class ScaledFloats(StoredWeight):
    """8-bit floats or integers with a scale per block of rows and columns."""

    numbers: Tensor  # [out, in] e4m3 or int8
    scales: Tensor  # [blocks of rows, blocks of columns] float32
    block: tuple[int, int]  # rows and columns of a block; the last ones may be smaller

    def __post_init__(self) -> None:
        rows, columns = self.numbers.shape
        down, across = self.block
        if self.scales.shape != (-(-rows // down), -(-columns // across)):
            raise ValueError(f"scales {list(self.scales.shape)} for the numbers {[rows, columns]}")

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def select_rows(self, rows: Tensor) -> StoredWeight:
        if self.block[0] != 1:
            return PlainValues(self.dequantized()[rows])
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows])

    @property
    def row_scales(self) -> Tensor | None:
        """[out]: the scale of each row, if blocks span all columns."""
        if self.scales.shape[1] != 1:
            return None
        return self.scales[:, 0].repeat_interleave(self.block[0])[: self.shape[0]]

    def dequantized(self) -> Tensor:
        rows, columns = self.shape
        down, across = self.block
        scales = self.scales.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
        return self.numbers.float() * scales


@dataclass(frozen=True, slots=True)
class MicroscaledFloats(StoredWeight):
    """4-bit floats (e2m1) of which 32 neighbours share a power of two: MXFP4. May hold the matrices of all experts."""

    codes: Tensor  # [..., out, groups, 16] uint8: two numbers each, the lower half first
    exponents: Tensor  # [..., out, groups] uint8: a group's scale is 2 ** (exponent - 127)

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.exponents.dtype != torch.uint8 or self.codes.shape[-1] != 16:
            raise ValueError("blocks must be 16 bytes each, and scales bytes")
        if self.codes.shape[:-1] != self.exponents.shape:
            raise ValueError(f"scales {list(self.exponents.shape)} for the blocks {list(self.codes.shape)}")

    @property
    def shape(self) -> torch.Size:
        *rows, groups, size = self.codes.shape
        return torch.Size((*rows, groups * 2 * size))

    def __getitem__(self, index: int | Tensor) -> MicroscaledFloats:
        return MicroscaledFloats(self.codes[index], self.exponents[index])

    def as_microscaled(self) -> MicroscaledFloats:
        return self

    def to(self, device: torch.device) -> MicroscaledFloats:
        return MicroscaledFloats(self.codes.to(device), self.exponents.to(device))

    def matrices(self) -> list[MicroscaledFloats]:
        return [self] if len(self.shape) == 2 else [self[index] for index in range(len(self.codes))]

    def select_rows(self, rows: Tensor) -> MicroscaledFloats:
        return self[rows.to(self.codes.device)]

    def dequantized(self) -> Tensor:
        powers = self.exponents.int() - 127
        return torch.ldexp(e2m1_values(self.codes), powers[..., None]).flatten(-2)

    @property
    def block_kind(self) -> str | None:
        fits = self.exponents.numel() > 0 and len(self.shape) == 2
        if not fits or int(self.exponents.min()) < MIN_EXPONENT or int(self.exponents.max()) > MAX_EXPONENT:
            return None
        return "E2M1_32"

    def block_rows(self) -> StoredBlocks:
        return _blocks_of(
            self.codes, torch.ldexp(torch.ones(self.exponents.shape), self.exponents.int() - 127)[..., None]
        )


# Blocks have halves of the scales in float16, and these powers of two are exact there.
MIN_EXPONENT, MAX_EXPONENT = 127 - 23, 127 + 15


@dataclass(frozen=True, slots=True)
class GroupedFloats(StoredWeight):
    """4-bit floats (e2m1); each group of 16 or 32 columns of a row has a scale: NVFP4, whose scales are 8-bit floats
    times one number."""

    codes: Tensor  # [out, in / 2] uint8: two numbers each, the lower half first
    scales: Tensor  # [out, groups] float32

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape[0], 2 * self.codes.shape[1]
        if self.codes.dtype != torch.uint8 or self.scales.ndim != 2 or len(self.scales) != rows:
            raise ValueError(f"scales {list(self.scales.shape)} for {rows} rows of {self.codes.dtype}")
        if self.scales.shape[1] * self.group_size != columns or self.group_size not in (16, 32):
            raise ValueError(f"scales {list(self.scales.shape)} for {columns} columns in groups of 16 or 32")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), 2 * self.codes.shape[1]))

    @property
    def group_size(self) -> int:
        return 2 * self.codes.shape[1] // max(1, self.scales.shape[1])

    def select_rows(self, rows: Tensor) -> GroupedFloats:
        return GroupedFloats(self.codes[rows], self.scales[rows])

    def dequantized(self) -> Tensor:
        groups: Tensor = e2m1_values(self.codes).unflatten(1, (-1, self.group_size))
        return (groups * self.scales[..., None]).flatten(1)

    @property
    def block_kind(self) -> str | None:
        return f"E2M1_{self.group_size}"

    def block_rows(self) -> StoredBlocks:
        return _blocks_of(self.codes.unflatten(1, (-1, GROUP // 2)), self.scales.unflatten(1, (-1, self._per_block)))

    @property
    def _per_block(self) -> int:
        return GROUP // self.group_size


_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # Each code of a 4-bit float has one.


def e2m1_values(codes: Tensor) -> Tensor:
    """Pairs of 4-bit floats [..., n] uint8, the lower half first -> [..., 2 * n] float32."""
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1)
    return pairs.flatten(-2)


def _blocks_of(codes: Tensor, scales: Tensor) -> StoredBlocks:
    """codes [rows, blocks, 16], scales [rows, blocks, 1 or 2] -> blocks of 32 columns: the halves of their scales in
    float16, then 16 bytes, each with the numbers i and i + 16."""
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [rows, blocks, 32]
    packed = numbers[..., :16] | numbers[..., 16:] << 4
    halves = (scales.float() / 2).half().numpy().view(np.uint8)
    return StoredBlocks(np.concatenate([halves, packed.numpy()], axis=-1).reshape(len(codes), -1))


@dataclass(frozen=True, slots=True)
class PlainValues(StoredWeight):
    """A weight that its reader has dequantized, since no format computes with its form."""

    values: Tensor  # [out, in] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        return self.values


def dequantized(tensors: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """Replace quantized weights by their values in float32."""
    for name, tensor in tensors:
        yield name, tensor if isinstance(tensor, Tensor) else tensor.dequantized()


def dequantized_matrices(tensors: NamedWeights) -> NamedWeights:
    """As `dequantized`, but stacks of matrices stay as they are: all experts of a layer at once would need too much
    memory."""
    for name, tensor in tensors:
        if isinstance(tensor, StoredWeight) and len(tensor.shape) == 2:
            tensor = tensor.dequantized()
        yield name, tensor


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(-2)


T = TypeVar("T")

_NOTHING = object()


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, each prepared in a thread while the caller processes the one before."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="chairlift-read-ahead") as thread:
        upcoming = thread.submit(next, iterator, cast(T, _NOTHING))
        while (item := upcoming.result()) is not _NOTHING:
            upcoming = thread.submit(next, iterator, cast(T, _NOTHING))
            yield item
