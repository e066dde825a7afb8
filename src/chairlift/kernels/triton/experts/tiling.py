"""Tiles of the products of a mixture of experts.

Those of bfloat16 and of 4-bit floats are the fastest of about ten for each number of tokens on an H200, by the time of
whole layers in captured graphs, over the shapes of gpt-oss-20b, Qwen3-30B-A3B, Qwen3-Next and DeepSeek-V2-Lite.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from chairlift.kernels.triton.launch import next_power_of_2, shared_memory, tuned

# Of a tile of shared experts. 128 take so much shared memory that a multiprocessor has one program instead of two.
MOST_SHARED_ROWS = 64
# Up to which shared experts are computed with the others. With 1 to 256 tokens of DeepSeek-V2-Lite that takes less time
# on an H200 (docs/gpu.md has the figures); more were not measured.
MOST_FOLDED_TOKENS = 256
LARGE_TILES = 128 * 2**10  # bytes of shared memory that tiles of 128 rows need
WIDE_TILES = 192 * 2**10  # bytes that those of 128 rows and 256 columns need

Form = Literal["plain", "fp8", "mxfp4"]


class ExpertTiling(NamedTuple):
    """The tile of one program, pipeline depth and splits of the sum."""

    rows: int
    columns: int  # rows of the weight, of which gate and up have one half each
    depth: int  # elements of the sum per iteration; 4-bit floats have a fixed one
    stages: int
    warps: int = 4
    splits: int = 1  # Sums of 4-bit floats are split if the products of each token's experts are added.


class ExpertTilings(NamedTuple):
    """The tiles of both products, which have the same number of rows."""

    inner: ExpertTiling  # gate and up
    outer: ExpertTiling  # down

    @property
    def rows(self) -> int:
        return self.inner.rows


def has_few_pairs(pairs: int, num_experts: int) -> bool:
    """Whether most experts have one tile of few rows, so that reading the weights takes most of the time."""
    return pairs <= 16 * num_experts


def tiling_for(
    pairs: int, num_experts: int, dtype: torch.dtype, form: Form, device: torch.device, *, invariant: bool
) -> ExpertTilings:
    """Tiles for a number of pairs: few pairs per expert use few rows, since experts do not share tiles. Invariant
    products use one tiling for all."""
    if dtype == torch.float32:
        return _both(ExpertTiling(16, 32, 32, 2))
    is_fixed = invariant or not tuned()
    is_large = pairs > 128 * num_experts and shared_memory(device) >= LARGE_TILES and not is_fixed
    if form == "mxfp4":
        return _microscaled_tiling(64.0 if is_fixed else pairs / num_experts, is_large)
    if is_large and form == "plain":
        columns = 256 if shared_memory(device) >= WIDE_TILES + 2**10 else 128
        return _both(ExpertTiling(128, columns, 64, 4, warps=8))
    if is_fixed or pairs > 64 * num_experts:
        return _both(ExpertTiling(64, 128, 64, 4))
    return _both(ExpertTiling(16, 64, 128, 4) if pairs <= 12 * num_experts else ExpertTiling(32, 128, 128, 3))


def _microscaled_tiling(pairs: float, is_large: bool) -> ExpertTilings:
    """Tiles of 4-bit floats for a number of pairs per expert."""
    if is_large:
        return ExpertTilings(ExpertTiling(128, 128, 128, 3), ExpertTiling(128, 128, 128, 3, warps=8))
    if pairs <= 5:
        return ExpertTilings(ExpertTiling(8, 128, 128, 3), ExpertTiling(8, 64, 128, 4, warps=2))
    if pairs <= 10:
        return ExpertTilings(ExpertTiling(16, 128, 128, 3), ExpertTiling(16, 128, 128, 4, warps=2))
    rows = 32 if pairs <= 24 else 64
    return ExpertTilings(ExpertTiling(rows, 128, 128, 3), ExpertTiling(rows, 128, 128, 4))


def folds_shared(tokens: int) -> bool:
    """Whether shared experts are computed with the others; kernels that serve every step do not."""
    return tuned() and tokens <= MOST_FOLDED_TOKENS


def shared_tile_rows(tokens: int, rows: int) -> int:
    """Rows of the tiles of experts that all tokens use, where others have tiles of `rows`: their weights are read anew
    for each tile, though not from memory."""
    return max(rows, min(next_power_of_2(tokens), MOST_SHARED_ROWS))


def shared_stages(tiling: ExpertTiling, rows: int) -> int:
    """The pipeline depth of tiles with `rows` that take about the memory of the others, of which a multiprocessor then
    has as many as without them."""
    return max(2, tiling.stages * (tiling.rows + tiling.columns) // (rows + tiling.columns))


def few_rows_tiling(tokens: int, dtype: torch.dtype, form: Form) -> ExpertTilings:
    """Tiles for steps of few tokens: one has all pairs of an expert."""
    if dtype == torch.float32:
        return _both(ExpertTiling(16, 64, 32, 2))
    if form == "mxfp4":
        inner = ExpertTiling(8, 64, 128, 4, warps=1) if tokens == 1 else ExpertTiling(8, 64, 128, 3, warps=2)
        return ExpertTilings(inner, ExpertTiling(8, 64, 128, 4, warps=2, splits=2))
    if form == "fp8":
        return ExpertTilings(ExpertTiling(16, 32, 128, 5), ExpertTiling(16, 32, 128, 4))
    return _both(ExpertTiling(16, 64, 128, 4))


def _both(tiling: ExpertTiling) -> ExpertTilings:
    return ExpertTilings(tiling, tiling)
