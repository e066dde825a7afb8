"""Operations that do not depend on the number of rows.

On a CPU torch splits work by the number of rows and threads. Where a split falls between the lanes of a vector, the
elements next to it are computed by other code, with other rounding. A call with a fixed number of rows is always split
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu

TILE = 16  # rows of a product: few enough for a decode step, enough to reuse a weight that was read
UNSPLIT = 32767  # Torch computes as many numbers on one thread (its GRAIN_SIZE is one more).
VECTOR = 32  # numbers that torch computes at a time, of the largest registers; the rest is computed one by one


def one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), computed for each row [1, ...] on its own."""
    return function(x) if len(x) <= 1 else torch.cat([function(row) for row in x.split(1)])


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x [T, ..., size]), of which each number depends on its row only, with the same bits for any T.

    On a CPU, rows of whole vectors are computed together as long as torch does not split them between threads."""
    if on_gpu(x.device) or len(x) <= 1:
        return function(x)
    together = 1 if x.shape[-1] % VECTOR else max(1, UNSPLIT // x[0].numel())
    return function(x) if len(x) <= together else torch.cat([function(rows) for rows in x.split(together)])


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x [T, size]), computed for TILE rows at a time; the last tile is padded with zeros."""
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % TILE))
    return torch.cat([function(tile) for tile in padded.split(TILE)])[:rows] if rows else function(x)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Logits that are bent to lie between -cap and cap."""
    if on_gpu(logits.device):
        from chairlift.kernels.triton.products.activation import softcap

        return softcap(logits, cap)
    shares = logits.float().div_(cap)  # The buffer is reused: the logits of a large vocabulary are megabytes per row.
    return row_by_row(torch.tanh_, shares) * cap
