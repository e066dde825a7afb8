"""Weights in 8-bit integers on the CPU, with a scale per output channel; activations are rounded at every step."""

from __future__ import annotations

import torch

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats._tiled import TiledWeight, tiled_traits


@FORMATS.register("int8")
class Int8Weight(TiledWeight):
    """Every row has scales of its own, and integer sums are exact."""

    name = "int8"
    # The table is far finer than 8 bits, and takes half the memory.
    traits = tiled_traits("chairlift.kernels.cpu.int8", "PackedWeight", torch.float16, expert_blocks="blocks")

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        return out_features * (in_features + 4)  # a scale for each output channel
