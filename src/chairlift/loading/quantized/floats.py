"""Readers of weights in floats of 8 and 4 bits: fp8, NVIDIA's ModelOpt and MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, WeightParts, by_suffix

if TYPE_CHECKING:
    from chairlift.loading.stored_weight import StoredWeight


@READERS.register("fp8")
class FP8Reader(QuantizedReader):
    """8-bit floats with a scale per block (DeepSeek, Qwen) or per tensor."""

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

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        from chairlift.loading.stored_weight import ScaledFloats

        numbers = parts["weight"]
        scales = (parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]).float()
        rows, columns = numbers.shape
        if scales.numel() == 1:
            return ScaledFloats(numbers, scales.reshape(1, 1), (rows, columns))
        if scales.shape in ((rows,), (rows, 1)):
            return ScaledFloats(numbers, scales.reshape(rows, 1), (1, columns))
        return ScaledFloats(numbers, scales, self._block or (rows, columns))


@READERS.register("modelopt")
class ModelOptReader(FP8Reader):
    """8-bit floats with a scale per tensor or per output channel.

    ModelOpt's settings are in config.json or in a file of their own, hf_quant_config.json; they name an algorithm for
    weights and one for the KV cache, whose scales are not used.
    """

    name = "modelopt"
    algorithms = {"FP8": "a scale per tensor", "FP8_PER_CHANNEL_PER_TOKEN": "a scale per output channel"}  # noqa: RUF012
    not_read = (
        ("NVFP4", "4-bit floats with an 8-bit scale per 16"),
        ("MXFP8", "8-bit floats with a power of two per 32"),
        ("MIXED_PRECISION", "formats that differ between layers"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"quant_method": self.name})
        self._algorithm = str(config.get("quant_algo")).upper()
        if self._algorithm not in self.algorithms:
            reason = next((meaning for name, meaning in self.not_read if self._algorithm.startswith(name)), None)
            meaning = f" ({reason})" if reason else ""
            raise self.refuse(f"{self._algorithm:.60}{meaning} is not read, only {', '.join(self.algorithms)}")

    def description(self) -> str:
        return f"ModelOpt {self._algorithm}, 8-bit floats with {self.algorithms[self._algorithm]}"


@READERS.register("mxfp4")
class MXFP4Reader(QuantizedReader):
    """The experts of gpt-oss, as 4-bit floats with a power of two for each group of 32.

    Those of a layer are stacked: NAME_blocks [experts, out, groups, 16], NAME_scales [experts, out, groups].
    """

    name = "mxfp4"

    def description(self) -> str:
        return "mxfp4, 4-bit floats with a scale per 32"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        weights: dict[str, dict[str, str]] = {}
        for name in names:
            for part in ("blocks", "scales"):
                if name.endswith(f"_{part}"):
                    weights.setdefault(name.removesuffix(f"_{part}"), {})[part] = name
        return {weight: parts for weight, parts in weights.items() if len(parts) == 2}

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        from chairlift.loading.stored_weight import MicroscaledFloats

        return MicroscaledFloats(parts["blocks"], parts["scales"])
