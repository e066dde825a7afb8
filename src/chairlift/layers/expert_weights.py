"""The weights of one product of all experts: plain, or 4-bit floats as their checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from chairlift.loading.stored_weight import GROUP, MicroscaledFloats, StoredWeight

CHUNK = 2 * GROUP  # columns in a run of bytes: the first half in their lower bits, the second in their upper bits


class ExpertWeights:
    """[experts, out, in]; memory is allocated when the first rows come.

    `keeps_stored`: keep rows that are stored as 4-bit floats with a power of two per 32 columns (MXFP4) as they are.
    Bytes are reordered: byte i of a run of 32 has column i of a group in its lower bits and column i of the next group
    in its upper bits. A kernel that reads a tile of bytes gets two tiles of neighbouring columns, each with its scale.
    """

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keeps_stored: bool = False,
    ) -> None:
        self.shape = torch.Size((num_experts, out_features, in_features))
        self.dtype = dtype
        self.device = device
        self.codes: Tensor | None = None  # [experts, out, in / 2] uint8
        self.exponents: Tensor | None = None  # [experts, out, in / 32] uint8
        self._plain: Tensor | None = None
        self._keeps_stored = keeps_stored and in_features % CHUNK == 0

    @property
    def plain(self) -> Tensor:
        """[experts, out, in], if the weights are not kept in 4 bits."""
        if self._plain is None:
            assert self.codes is None
            self._plain = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self._plain

    @property
    def num_bytes(self) -> int:
        if self.codes is not None and self.exponents is not None:
            return self.codes.nbytes + self.exponents.nbytes
        return self.shape.numel() * self.dtype.itemsize

    def rows(self, expert: int, first: int, count: int) -> ExpertRows:
        """What a checkpoint fills with some rows of an expert."""
        return ExpertRows(self, expert, first, count)

    def fill(self, expert: int, first: int, source: Tensor | StoredWeight) -> None:
        stored = None if isinstance(source, Tensor) else source.as_microscaled()
        if stored is not None and self._keeps_stored and self._plain is None:
            self._fill_codes(expert, first, stored)
            return
        if self.codes is not None:  # other rows came in 4 bits, these do not
            self._become_plain()
        values = source if isinstance(source, Tensor) else source.dequantized()
        self.plain[expert, first : first + len(values)].copy_(values)

    def _fill_codes(self, expert: int, first: int, stored: MicroscaledFloats) -> None:
        experts, out_features, in_features = self.shape
        if self.codes is None or self.exponents is None:
            self.codes, self.exponents = (
                torch.zeros(experts, out_features, columns, dtype=torch.uint8, device=self.device)
                for columns in (in_features // 2, in_features // GROUP)
            )
        rows = slice(first, first + stored.shape[0])
        self.codes[expert, rows] = reordered(stored.codes.to(self.device))
        self.exponents[expert, rows] = stored.exponents.to(self.device)

    def _become_plain(self) -> None:
        codes, exponents = self.codes, self.exponents
        assert codes is not None
        assert exponents is not None
        self.codes = self.exponents = None
        for expert, plain in enumerate(self.plain):
            plain.copy_(MicroscaledFloats(restored(codes[expert]), exponents[expert]).dequantized())


class ExpertRows:
    """Some rows of an expert's matrix, as a target for a checkpoint's tensor."""

    def __init__(self, weights: ExpertWeights, expert: int, first: int, count: int) -> None:
        self._weights = weights
        self._expert = expert
        self._first = first
        self.shape = torch.Size((count, weights.shape[2]))

    def copy_(self, source: Tensor | StoredWeight, /) -> None:
        self._weights.fill(self._expert, self._first, source)


def reordered(codes: Tensor) -> Tensor:
    """[out, groups, 16], neighbouring columns in a byte -> [out, in / 2], as `ExpertWeights` stores them."""
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [out, groups, 32]
    pairs = numbers.unflatten(-2, (-1, 2))  # [out, chunks, 2, 32]
    both: Tensor = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return both.flatten(-2)


def restored(codes: Tensor) -> Tensor:
    """The inverse of `reordered`."""
    bytes_ = codes.unflatten(-1, (-1, GROUP))  # [out, chunks, 32]
    numbers = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-2).flatten(-3, -2)  # [out, groups, 32]
    pairs = numbers.unflatten(-1, (-1, 2))
    found: Tensor = pairs[..., 0] | pairs[..., 1] << 4
    return found
