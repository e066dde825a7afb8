"""How experts in 4-bit floats (MXFP4) lie in memory.

A chunk of a row is 128 columns in 32 words of 16 bits: word i has columns i, i + 32, i + 64 and i + 96, one of each
group of 32 columns that share a scale. So a tile of words is four tiles of the weight, and no number moves to another
thread. The bits of a number lie where few operations move them to those of a bfloat16:

    bit      15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    number    0  2  3  1  2  2  2  0  0  0  1  1  1  3  3  3      the sign first, then two of exponent, one of mantissa

16 rows of a chunk are stored one behind the other: a program reads memory in sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.loading.stored_weight import GROUP, MicroscaledFloats

PANEL = 16  # rows stored one behind the other
RUN = GROUP  # words of a chunk
CHUNK = 4 * RUN  # columns
# The scales that are stored are those of the checkpoint times 2 ** -65, as the exponent of a bfloat16: with the
# smallest number of 4 bits, whose bits are those of 2 ** -127, they stay within its range.
EXPONENT = 62
_PLACES = ((15, 6), (12, 3), (14, 9), (13, 0))  # The sign and the other bits of each number are shifted by these.


def can_pack(rows: int, columns: int) -> bool:
    return rows % PANEL == 0 and columns % GROUP == 0


def num_chunks(columns: int) -> int:
    return -(-columns // CHUNK)


def packed(weight: MicroscaledFloats) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> words [panels, chunks, PANEL, RUN] int16, exponents [chunks, rows] int32, four bytes each."""
    columns = weight.shape[1]
    missing = num_chunks(columns) * 4 - columns // GROUP
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(-2)  # [rows, groups, 32]
    chunks = F.pad(codes, (0, 0, 0, missing)).unflatten(1, (-1, 4)).int()  # [rows, chunks, 4, 32]
    words = torch.zeros_like(chunks[:, :, 0])
    for index, (sign, rest) in enumerate(_PLACES):
        code = chunks[:, :, index]
        words |= (code >> 3) << sign | (code & 7) << rest
    exponents = F.pad((weight.exponents.int() + EXPONENT).clamp(max=254), (0, missing)).to(torch.uint8)
    return (
        words.to(torch.int16).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous(),
        exponents.contiguous().view(torch.int32).t().contiguous(),
    )


def unpacked(words: Tensor, exponents: Tensor, columns: int) -> MicroscaledFloats:
    """The inverse of `packed`."""
    chunks = words.transpose(1, 2).flatten(0, 1).int()  # [rows, chunks, 32]
    numbers = [(chunks >> sign & 1) << 3 | chunks >> rest & 7 for sign, rest in _PLACES]
    codes = torch.stack(numbers, dim=2).flatten(1, 2)[:, : columns // GROUP].to(torch.uint8).unflatten(-1, (-1, 2))
    stored = exponents.t().flatten().view(torch.uint8).unflatten(0, (len(chunks), -1))[:, : columns // GROUP]
    return MicroscaledFloats(codes[..., 0] | codes[..., 1] << 4, (stored.int() - EXPONENT).to(torch.uint8))
