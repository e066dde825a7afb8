"""MXFP4: the experts of gpt-oss, as 4-bit floats with a power of two for each group of 32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight

_PARTS = {"_blocks": "blocks", "_scales": "scales"}


@READERS.register("mxfp4")
class MXFP4Reader(QuantizedReader):
    """Reads the experts of a layer, stacked: NAME_blocks [experts, out, groups, 16], NAME_scales [experts, out,
    groups]."""

    name = "mxfp4"

    def description(self) -> str:
        return "mxfp4, 4-bit floats with a scale per 32"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        weights: dict[str, dict[str, str]] = {}
        for name in names:
            for suffix, part in _PARTS.items():
                if name.endswith(suffix):
                    weights.setdefault(name.removesuffix(suffix), {})[part] = name
        return {weight: parts for weight, parts in weights.items() if len(parts) == len(_PARTS)}

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        from chairlift.loading.stored_weight import MicroscaledFloats

        return MicroscaledFloats(parts["blocks"], parts["scales"])
