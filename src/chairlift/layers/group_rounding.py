"""Rounding a matrix to 4-bit integers with a scale and an offset per group, chosen for the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 15
# Shares of a group's range that the sixteen levels cover. Less than all of it clips the extremes and makes the steps
# between all others smaller; more candidates gain nothing that shows in a perplexity.
SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8)
SLAB = 2**24  # elements rounded at once


def round_groups(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], in groups of columns -> numbers [out, in] uint8, scales and offsets [out, groups] in `dtype`.

    A number n of a group stands for n * scale + offset.
    """
    out, columns = weight.shape
    numbers = torch.empty(out, columns, dtype=torch.uint8, device=weight.device)
    scales, offsets = (
        torch.empty(out, columns // group, dtype=dtype, device=weight.device) for _ in ("scales", "offsets")
    )
    rows = max(1, SLAB // columns)
    for first in range(0, out, rows):
        part = slice(first, first + rows)
        groups = weight[part].float().unflatten(1, (-1, group))
        scale, offset = _best_grid(groups, dtype)
        numbers[part] = _levels(groups, scale, offset).to(torch.uint8).flatten(1)
        scales[part], offsets[part] = scale.squeeze(2).to(dtype), offset.squeeze(2).to(dtype)
    return numbers, scales, offsets


def _best_grid(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """groups [rows, groups, size] float32 -> scales and offsets [rows, groups, 1], rounded to `dtype`."""
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_offset = torch.zeros_like(low), torch.zeros_like(low)
    for share in SHARES:
        trim = (high - low) * ((1.0 - share) / 2)
        scale, offset = _refine(groups, (high - low - 2 * trim) / LARGEST, low + trim)
        scale, offset = scale.to(dtype).float(), offset.to(dtype).float()
        error = (_levels(groups, scale, offset) * scale + offset - groups).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
        best_error = torch.where(better, error, best_error)
    return best_scale, best_offset


def _levels(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """The nearest of 0 .. 15 steps from the offset; zero where the scale is zero."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return ((groups - offset) * inverse).round_().clamp_(0, LARGEST)


def _refine(groups: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and offset with the least squared error for the levels of the given ones (linear regression)."""
    levels = _levels(groups, scale, offset)
    mean, level_mean = groups.mean(dim=2, keepdim=True), levels.mean(dim=2, keepdim=True)
    spread = (levels - level_mean).square().sum(dim=2, keepdim=True)
    slope = ((levels - level_mean) * (groups - mean)).sum(dim=2, keepdim=True) / spread.clamp_min(1e-6)
    slope = torch.where(spread > 0, slope, scale)
    return slope, mean - slope * level_mean
