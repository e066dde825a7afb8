"""Weights in bfloat16 on the CPU. Products round activations to bfloat16; sums and all else are float32."""

from __future__ import annotations

import torch

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats._tiled import TiledWeight, tiled_traits


@FORMATS.register("bfloat16")
class BFloat16Weight(TiledWeight):
    name = "bfloat16"
    traits = tiled_traits("chairlift.kernels.cpu.bfloat16", "HalfWeight", torch.bfloat16)

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        return out_features * in_features * 2
