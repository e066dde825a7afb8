"""How kernels follow each other, and what their programs compute.

On Hopper and later a kernel may be set up while the one before it still runs. A kernel waits for its predecessor where
it first needs its results, and right after that says "go ahead" to its successor. That hides most of the microsecond or
two between kernels, of which a decode step has hundreds. So while a kernel stands before its wait, only the one before
it may still run: what is read there must be older than that one. Weights are, and tables, which the first kernel of a
step writes, and keys and values of earlier steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def prefetch_rows(rows, num_bytes):
    """Asks for the first bytes of each row (a tensor of pointers) to be brought into the L2 cache. Hopper and later."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [rows.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options, and the `OVERLAP` argument that every kernel here takes."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if hopper else {"OVERLAP": False}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have. The interpreter has no limit."""
    if device.type != "cuda":
        return 2**30
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


# Triton has both, but made for kernels too: there a call takes some microseconds, and a step makes hundreds.


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def last_power_of_2(number: int) -> int:
    """The largest power of two that is not above `number`, or 1."""
    return 1 << max(0, number.bit_length() - 1)


def spare_rows(rows: int) -> int:
    """How many rows a tensor of so many should have room for."""
    if rows <= 16:
        return 16
    return 64 if rows <= 64 else cdiv(rows, 128) * 128


def empty_rows(rows: int, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [rows, *size], with room behind it, so that the tiles of the product that reads it are all inside.

    The hardware that copies tiles takes up to half again as long for one that is partly outside of its tensor."""
    return torch.empty(spare_rows(rows), *size, dtype=dtype, device=device)[:rows]


def picked_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of `x`, with room behind them."""
    return torch.index_select(x, 0, rows, out=empty_rows(len(rows), *x.shape[1:], dtype=x.dtype, device=x.device))


class Tiling(NamedTuple):
    """What one program of a matrix product computes."""

    rows: int
    columns: int
    depth: int  # of the sum that is loaded at once
    stages: int
    parts: int = 1  # into which the sum is cut
