"""Tiles of products with 4-bit weights."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from chairlift.kernels.triton.launch import cdiv, last_power_of_2, shared_memory

MOST_SPLITS = 8
SPARE_SHARED = 8 * 2**10  # bytes of shared memory besides the tiles, rounded up
SCALE_WORDS = 8  # 16-bit words of scales and offsets of a row in a chunk, at most


class Int4Tiling(NamedTuple):
    """Tile of one program, splits of the sum, pipeline depth."""

    rows: int
    columns: int
    splits: int
    stages: int
    warps: int
    few: bool = True  # scale the sums of each group, not the weights
    prefetch: int = 2  # chunks


def _splits(tiles: int, programs: int, depth: int, group: int) -> int:
    """Splits of the sum that give this number of programs, with at least four chunks each."""
    chunks = cdiv(depth, 4 * min(group, 64))
    return max(1, min(last_power_of_2(cdiv(programs, tiles)), MOST_SPLITS, chunks // 4))


@cache
def invariant_int4_tiling(columns: int, depth: int, group: int) -> Int4Tiling:
    """Tiling by the weight's shape alone, so that it does not depend on the batch."""
    return Int4Tiling(64, 64, _splits(cdiv(columns, 64), 150, depth, group), 3, 4, few=False)


@cache
def choose_int4_tiling(rows: int, columns: int, depth: int, gated: bool, group: int) -> Int4Tiling:
    """The best of about fifty tilings per kind of product on an H200."""

    def splits(height: int, width: int, programs: int) -> int:
        return _splits(cdiv(rows, height) * cdiv(columns, width), programs, depth, group)

    if rows <= 8:
        return (
            Int4Tiling(8, 64, splits(8, 64, 500), 4, 2) if group == 32 else Int4Tiling(8, 64, splits(8, 64, 220), 6, 2)
        )
    if rows <= 32:
        height = 16 if rows <= 16 else 32
        return Int4Tiling(height, 64, splits(height, 64, 400), 4 if height == 16 else 3, 2, few=False)
    if rows <= 64:
        return Int4Tiling(64, 128, 1 if gated else splits(64, 128, 250), 3, 8, few=False)
    if gated:
        return Int4Tiling(64, 128, 1, 3, 4, few=False)
    return Int4Tiling(128, 128, splits(128, 128, 130), 3, 8, few=False)


@cache
def fitting_int4(tiling: Int4Tiling, run: int, gated: bool, device: torch.device) -> Int4Tiling:
    """Reduce stages, then columns, then rows until two stages fit into shared memory."""
    narrow = tiling._replace(columns=min(64, tiling.columns), warps=min(4, tiling.warps))
    for one in (tiling, narrow, narrow._replace(rows=min(64, tiling.rows)), narrow._replace(rows=min(32, tiling.rows))):
        words = one.columns * (run + SCALE_WORDS) * (2 if gated else 1)
        stages = (shared_memory(device) - SPARE_SHARED) // ((words + one.rows * 4 * run) * 2)
        if stages >= 2:
            break
    return one._replace(stages=max(1, min(stages, tiling.stages)))
