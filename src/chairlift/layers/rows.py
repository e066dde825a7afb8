"""Row by row: for what must not depend on how many rows there are.

On a CPU torch cuts its work by the number of rows and of threads, and where a cut falls between the lanes of a vector,
the numbers beside it take another way through the code, with another rounding. A call with a fixed number of rows is
always cut alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16  # rows of a product: few enough that a decode is not slowed down much, enough to use a weight that was read


def one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), computed for each row [1, ...] by itself."""
    return function(x) if len(x) <= 1 else torch.cat([function(row) for row in x.split(1)])


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x [T, size]), computed for TILE rows at a time; the last ones are filled up with zeros."""
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % TILE))
    return torch.cat([function(tile) for tile in padded.split(TILE)])[:rows] if rows else function(x)
