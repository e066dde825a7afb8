"""Weights of a GGUF file in blocks, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from chairlift.loading.gguf.checkpoint import Source
from chairlift.loading.gguf.file import GGUFFile
from chairlift.loading.stored_weight import GroupedIntegers, MicroscaledFloats, StoredBlocks, StoredWeight

GROUP = 32  # columns with a scale of their own, in all three kinds


@dataclass(frozen=True, slots=True)
class GGUFWeight(StoredWeight):
    """A matrix of a GGUF file, or some rows of it."""

    file: GGUFFile
    source: Source
    selected: np.ndarray | None = None  # the rows of the matrix that these are; None: all

    @property
    def shape(self) -> torch.Size:
        rows, *columns = self._whole_shape
        return torch.Size((rows if self.selected is None else len(self.selected), *columns))

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        shape = self.source.tensor.shape
        return shape if self.source.expert is None else shape[1:]

    @property
    def kind(self) -> str:
        """The name of its tensor type, such as Q4_K."""
        return self.file.kind(self.source.tensor)

    def dequantized(self) -> Tensor:
        values = self.source.read(self.file)
        return torch.from_numpy(values if self.selected is None else values[self.selected])

    def select_rows(self, rows: Tensor) -> GGUFWeight:
        chosen = rows.numpy()
        return replace(self, selected=chosen if self.selected is None else self.selected[chosen])

    @property
    def block_kind(self) -> str:
        return self.kind

    def block_rows(self) -> StoredBlocks:
        """All rows of the matrix, in the order of the file."""
        rows = self.file.blocks(self.source.tensor, self.source.expert).reshape(self._whole_shape[0], -1)
        return StoredBlocks(rows, self._row_order())

    def _row_order(self) -> np.ndarray:
        """The stored row of each row."""
        order = self.source.row_order(self._whole_shape[0])
        return order if self.selected is None else order[self.selected]

    def as_integers(self) -> GroupedIntegers | None:
        unpack = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}.get(self.kind)
        if unpack is None:
            return None
        blocks = self.file.blocks(self.source.tensor, self.source.expert)
        numbers, scales, offsets = unpack(blocks)
        rows, order = self._whole_shape[0], self._row_order()

        def in_order(part: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(part.reshape(rows, -1)[order]))

        return GroupedIntegers(4, in_order(numbers), in_order(scales), None if offsets is None else in_order(offsets))

    def as_microscaled(self) -> MicroscaledFloats | None:
        if self.kind != "MXFP4":
            return None
        blocks = self.file.blocks(self.source.tensor, self.source.expert)
        numbers = _nibbles(blocks[:, 1:])  # [blocks, 32]
        codes = numbers[:, 0::2] | numbers[:, 1::2] << 4
        rows, order = self._whole_shape[0], self._row_order()
        return MicroscaledFloats(
            torch.from_numpy(codes.reshape(rows, -1, 16)[order]),
            torch.from_numpy(blocks[:, 0].reshape(rows, -1)[order]),
        )


Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """[blocks, n * size] bytes of `size` = the last dimension -> the low nibbles of each run, then its high ones."""
    return np.concatenate((codes & 15, codes >> 4), axis=-1)


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return _nibbles(blocks[:, 2:]), blocks[:, :2].copy().view(np.float16), None


def _q4_1(blocks: np.ndarray) -> Unpacked:
    scales, low = blocks[:, :4].copy().view(np.float16).T
    return _nibbles(blocks[:, 4:]), scales, low.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Unpacked:
    """A block has eight groups, whose scales and minima are products of a float and an integer of six bits."""
    scale, low = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    first, second, high = blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scales = np.concatenate((first & 63, (high & 15) | (first >> 2 & 48)), axis=-1)
    lows = np.concatenate((second & 63, (high >> 4) | (second >> 2 & 48)), axis=-1)
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP))
    return numbers, scale[:, None] * scales.astype(np.float32), -(low[:, None] * lows.astype(np.float32))
