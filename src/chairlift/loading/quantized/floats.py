"""Readers of weights in floats of 8 and 4 bits: fp8, NVIDIA's ModelOpt, AMD's Quark and MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, WeightParts, by_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight


@READERS.register("fp8")
class FP8Reader(QuantizedReader):
    """8-bit floats with a scale per block (DeepSeek, Qwen) or per tensor."""

    name = "fp8"
    further: tuple[str, ...] = ("input_scale", "activation_scale")

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
        blocks = by_suffix(names, ("weight", "weight_scale_inv"), self.further)
        return blocks | by_suffix(names, ("weight", "weight_scale"), self.further)

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


class TypedReader(FP8Reader):
    """8- and 4-bit floats, in the form that the types and shapes of a weight's own tensors say.

    So layers may differ, and lists of the layers that are or are not quantized are not needed. Scales of activations
    (`input_scale`) are not used: activations are not rounded, or with a scale for each row.
    """

    further = ("weight_scale_2", "input_scale", "pre_quant_scale", "weight_zero_point", "output_scale")

    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        from chairlift.loading.stored_weight import PlainValues

        if "weight_scale_inv" in parts:
            return super().read(weight, parts)
        if "weight_zero_point" in parts and bool(parts["weight_zero_point"].float().any()):
            raise self.refuse(f"{weight} has zero points, which are not supported in floats")
        factor = parts["weight_scale_2"].float() if "weight_scale_2" in parts else None
        stored = floats_of(parts["weight"], parts["weight_scale"], factor)
        if "pre_quant_scale" not in parts:
            return stored
        return PlainValues(stored.dequantized() * parts["pre_quant_scale"].float())


@READERS.register("fbgemm_fp8")
class FBGEMMReader(TypedReader):
    """8-bit floats with a scale per output channel, as Meta publishes them."""

    name = "fbgemm_fp8"

    def description(self) -> str:
        return "fbgemm, 8-bit floats with a scale per output channel"


@READERS.register("modelopt")
class ModelOptReader(TypedReader):
    """Floats of 8 and 4 bits, as NVIDIA's ModelOpt writes them.

    Its settings are in config.json or in a file of their own, hf_quant_config.json; they name an algorithm for weights,
    or one for each layer, and one for the KV cache, whose scales are not used.
    """

    name = "modelopt"
    algorithms = {  # noqa: RUF012
        "FP8": "8-bit floats with a scale per tensor",
        "FP8_PER_CHANNEL_PER_TOKEN": "8-bit floats with a scale per output channel",
        "FP8_PB_WO": "8-bit floats with a scale per block",
        "FP8_PB_REAL": "8-bit floats with a scale per block",
        "MXFP8": "8-bit floats with a power of two per 32",
        "NVFP4": "4-bit floats with an 8-bit scale per 16",
        "NVFP4_AWQ": "4-bit floats with an 8-bit scale per 16, and factors of columns",
        "W4A16_NVFP4": "4-bit floats with an 8-bit scale per 16",
        "W4A8_NVFP4_FP8": "4-bit floats with an 8-bit scale per 16",
        "MXFP4": "4-bit floats with a power of two per 32",
        "W4A8_MXFP4_FP8": "4-bit floats with a power of two per 32",
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._algorithm = _algorithm(config.get("quant_algo"))
        layers = config.get("quantized_layers")
        self._layers: set[str] = set()  # the algorithms of layers that have their own
        if self._algorithm == "MIXED_PRECISION":
            if not isinstance(layers, Mapping) or not layers:
                raise self.refuse("its MIXED_PRECISION has no quantized_layers, which say what each layer has")
            for layer, settings in layers.items():
                own = settings.get("quant_algo") if isinstance(settings, Mapping) else None
                self._layers.add(self._check(_algorithm(own), f" of the layer {layer!r:.80}"))
        else:
            self._check(self._algorithm, "")

    def _check(self, algorithm: str, where: str) -> str:
        if algorithm not in self.algorithms:
            raise self.refuse(f"{algorithm:.60}{where} is not read, only {', '.join(self.algorithms)}")
        return algorithm

    def description(self) -> str:
        if not self._layers:
            return f"ModelOpt {self._algorithm}, {self.algorithms[self._algorithm]}"
        return f"ModelOpt {self._algorithm}: {', '.join(sorted(self._layers))}"


def _algorithm(value: Any) -> str:
    return str(value).upper()


@READERS.register("quark")
class QuarkReader(TypedReader):
    """8-bit floats per tensor or channel, and MXFP4, as AMD's Quark writes them."""

    name = "quark"
    types = {  # noqa: RUF012
        "fp8_e4m3": "8-bit floats",
        "fp4": "4-bit floats with a power of two per 32",
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        every = config.get("global_quant_config")
        own = config.get("layer_quant_config")
        sections = [each for each in [every, *(own.values() if isinstance(own, Mapping) else ())] if each]
        self._types = {self._type(each) for each in sections} - {None}
        if not self._types:
            raise self.refuse("its global_quant_config names no type of weights")
        if config.get("algo_config") and "rotation" in str(config["algo_config"]).lower():
            raise self.refuse("rotated weights (algo_config) are not supported")

    def _type(self, section: Any) -> str | None:
        """The type of the weights in a section of the settings; None if it leaves them as they are."""
        weights = section.get("weight") if isinstance(section, Mapping) else None
        weights = weights[0] if isinstance(weights, list) and len(weights) == 1 else weights
        if weights is None:
            return None
        found = weights.get("dtype") if isinstance(weights, Mapping) else None
        if str(found) not in self.types:
            raise self.refuse(f"weights of the type {found!r:.60} are not read, only {', '.join(self.types)}")
        return str(found)

    def description(self) -> str:
        return "Quark, " + " and ".join(sorted(self.types[str(each)] for each in self._types))


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


def floats_of(numbers: Tensor, scales: Tensor, factor: Tensor | None = None) -> StoredWeight:
    """A weight from its numbers, in bytes of which each has two numbers of 4 bits or in 8-bit floats, and their scales,
    which may be powers of two in a byte; `factor` multiplies all of them."""
    import torch

    from chairlift.loading.stored_weight import GroupedFloats, MicroscaledFloats, ScaledFloats

    powers = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if powers and factor is None and numbers.dtype == torch.uint8 and numbers.shape[-1] == 16 * scales.shape[-1]:
        return MicroscaledFloats(numbers.unflatten(-1, (-1, 16)), scales.view(torch.uint8))
    if powers:
        exponents = scales.view(torch.uint8).int() - 127
        scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    scales = scales.float() if factor is None else scales.float() * factor
    if numbers.dtype in (torch.uint8, torch.int8):
        return GroupedFloats(numbers.view(torch.uint8), scales)
    if numbers.dtype != torch.float8_e4m3fn:
        raise ValueError(f"numbers of {numbers.dtype} are neither 8-bit floats (e4m3) nor two numbers of 4 bits")
    rows, columns = numbers.shape
    if scales.numel() == 1:
        return ScaledFloats(numbers, scales.reshape(1, 1), (rows, columns))
    if scales.ndim == 4 and scales.shape[1] == scales.shape[3] == 1:  # ModelOpt has axes within the blocks, too.
        scales = scales[:, 0, :, 0]
    scales = scales.reshape(len(scales), -1)
    down, across = scales.shape
    if rows % down or columns % across:
        raise ValueError(f"scales {[down, across]} for the numbers {[rows, columns]} in blocks of unknown size")
    return ScaledFloats(numbers, scales, (rows // down, columns // across))
