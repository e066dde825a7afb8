"""How kernels follow each other, and what their programs compute.

On Hopper and later a kernel may be set up while the one before it still runs: it says "go ahead" to its successor as
soon as it starts, and its successor waits for it where it first needs its results. That hides most of the microsecond
or two between kernels, of which a decode step has hundreds. What is read before the wait must be older than the
kernel before: weights, tables, and what was written at the start of the step.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options, and the `OVERLAP` argument that every kernel here takes."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if hopper else {"OVERLAP": False}


class Tiling(NamedTuple):
    """What one program of a matrix product computes."""

    rows: int
    columns: int
    depth: int  # of the sum that is loaded at once
    stages: int
    parts: int = 1  # into which the sum is cut
