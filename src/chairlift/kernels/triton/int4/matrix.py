"""How 4-bit weights lie in memory; `kernel.py` says why."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PANEL = 16  # rows stored one behind the other
GROUPS = (128, 64, 32)  # sizes that the kernels have


class Int4Matrix(NamedTuple):
    """A matrix [rows, columns] in 4 bits."""

    words: Tensor  # int16 [rows / PANEL, chunks, PANEL, run]: four numbers each
    scales: Tensor  # int32 [groups, rows]: a scale and an offset; without offsets [groups / 2, rows], two scales
    columns: int
    group: int  # columns with a scale of their own
    half: bool  # scales are float16, not bfloat16
    has_offsets: bool

    @property
    def rows(self) -> int:
        return self.scales.shape[1]

    @property
    def run(self) -> int:
        """Neighbouring columns that are in neighbouring words."""
        return self.words.shape[3]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def can_store(rows: int, columns: int, group: int) -> bool:
    return rows % PANEL == 0 and group in GROUPS and columns % group == 0


def store(numbers: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Int4Matrix:
    """numbers [rows, columns] uint8, scales and offsets [rows, groups] in 16 bits, as the kernels read them."""
    rows, columns = numbers.shape
    run = min(group, 64)
    chunks = -(-columns // (4 * run))
    padded = (
        torch.nn.functional.pad(numbers, (0, chunks * 4 * run - columns))
        .view(rows // PANEL, PANEL, chunks, 4, run)
        .int()
    )
    words = padded[:, :, :, 0] | padded[:, :, :, 1] << 4 | padded[:, :, :, 2] << 8 | padded[:, :, :, 3] << 12
    missing = chunks * 4 * run // group - scales.shape[1]
    half = scales.dtype is torch.float16
    scales = torch.nn.functional.pad(scales, (0, missing))
    if offsets is not None:
        scales = torch.stack((scales, torch.nn.functional.pad(offsets.to(scales.dtype), (0, missing))), dim=2).flatten(
            1
        )
    return Int4Matrix(
        words.to(torch.int16).transpose(1, 2).contiguous(),
        scales.contiguous().view(torch.int32).t().contiguous(),
        columns,
        group,
        half,
        offsets is not None,
    )


def dequantized(matrix: Int4Matrix) -> Tensor:
    """The matrix [rows, columns] in float32."""
    rows = matrix.rows
    words = matrix.words.transpose(1, 2).reshape(rows, -1, 1, matrix.run).int()
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device).view(4, 1)
    numbers = (words >> shifts & 15).reshape(rows, -1, matrix.group).float()
    halves = matrix.scales.t().contiguous().view(torch.float16 if matrix.half else torch.bfloat16).float()
    scales, offsets = halves.view(rows, -1, 2).unbind(2) if matrix.has_offsets else (halves, -8.0 * halves)
    return torch.addcmul(offsets[..., None], numbers, scales[..., None]).flatten(1)[:, : matrix.columns]
