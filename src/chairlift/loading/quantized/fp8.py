"""fp8 checkpoints with a scale per block (DeepSeek, Qwen) or per tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, by_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight


@READERS.register("fp8")
class FP8Reader(QuantizedReader):
    name = "fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        fmt = config.get("fmt") or "e4m3"
        if fmt not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
            raise self.refuse(f"its 8-bit floats are {fmt!r:.60}, only e4m3 is supported")
        block = config.get("weight_block_size")
        whole = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(side) is int for side in block)
        if block is not None and not (whole and min(block) > 0):
            raise self.refuse(f"its weight_block_size {block!r:.60} is not two positive integers")
        self._block = None if block is None else (block[0], block[1])

    def description(self) -> str:
        return "fp8 with a scale per " + ("tensor" if self._block is None else f"{self._block[0]}x{self._block[1]}")

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        names = list(names)
        further = ("input_scale", "activation_scale")
        blocks = by_suffix(names, ("weight", "weight_scale_inv"), further)
        return blocks | by_suffix(names, ("weight", "weight_scale"), further)

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        from chairlift.loading.stored_weight import ScaledFloats

        numbers = parts["weight"]
        scales = (parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]).float()
        rows, columns = numbers.shape
        if scales.numel() == 1:
            return ScaledFloats(numbers, scales.reshape(1, 1), (rows, columns))
        if scales.shape in ((rows,), (rows, 1)):
            return ScaledFloats(numbers, scales.reshape(rows, 1), (1, columns))
        return ScaledFloats(numbers, scales, self._block or (rows, columns))
