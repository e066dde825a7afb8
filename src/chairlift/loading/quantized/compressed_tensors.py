"""compressed-tensors: 8-bit floats and 4- or 8-bit integers, as llm-compressor writes them.

Activations are not quantized with the checkpoint's scales: the weight formats round each row of activations with a
scale of its own, or not at all, which is at least as exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.errors import CorruptCheckpoint
from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, by_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import GroupedIntegers, StoredWeight

FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


@READERS.register("compressed-tensors")
class CompressedTensorsReader(QuantizedReader):
    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self.refuse("its quantization_config has no config_groups")
        self._weights = []
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                raise self.refuse("a group of its config_groups quantizes no weights")
            self._check(group.get("format") or config.get("format"), weights)
            self._weights.append(weights)
        sparsity = config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise self.refuse(f"sparse weights ({sparsity['format']}) are not supported")
        if config.get("transform_config"):
            raise self.refuse("weights transformed by rotations (transform_config) are not supported")

    def _check(self, format: Any, weights: Mapping[str, Any]) -> None:
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if format not in FORMATS:
            raise self.refuse(f"its format {format!r} is not supported; supported are {', '.join(FORMATS)}")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise self.refuse(f"weights of type {kind} with {bits} bits are not supported")

    def description(self) -> str:
        kinds = {f"{each.get('num_bits', 8)}-bit {each.get('type', 'int')}" for each in self._weights}
        return f"compressed-tensors, {' and '.join(sorted(kinds))}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        names = list(names)
        further = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point", "weight_shape")
        packed = by_suffix(names, ("weight_packed", "weight_scale"), further)
        return packed | by_suffix(names, ("weight", "weight_scale"), further)

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        from chairlift.loading.stored_weight import ScaledFloats

        if "weight_packed" in parts:
            return self._integers(weight, parts)
        numbers, scales = parts["weight"], parts["weight_scale"].float()
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
        if "weight_zero_point" in parts and bool(parts["weight_zero_point"].to(dtype=scales.dtype).any()):
            raise self.refuse(f"{weight} has zero points, which are supported in packed weights only")
        return ScaledFloats(numbers, scales, self._block(weight, scales, *numbers.shape))

    def _block(self, weight: str, scales: Tensor, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns that have a scale."""
        for block in (each.get("block_structure") for each in self._weights):
            if block and (-(-rows // block[0]), -(-columns // block[1])) == tuple(scales.shape):
                return block[0], block[1]
        if scales.numel() == 1:
            return rows, columns
        if len(scales) == rows and columns % scales.shape[1] == 0:  # a scale per channel or per group
            return 1, columns // scales.shape[1]
        raise CorruptCheckpoint(f"{weight}: scales of the shape {list(scales.shape)} do not fit [{rows}, {columns}]")

    def _integers(self, weight: str, parts: Mapping[str, Tensor]) -> GroupedIntegers:
        from chairlift.loading.stored_weight import GroupedIntegers, unpack_bits

        packed, scales = parts["weight_packed"], parts["weight_scale"]
        columns = int(parts["weight_shape"][1]) if "weight_shape" in parts else None
        bits = next((each for each in (4, 8) if columns and -(-columns * each // 32) == packed.shape[1]), None)
        if bits is None or columns is None:
            raise CorruptCheckpoint(f"{weight}: weight_packed {list(packed.shape)} does not fit weight_shape")
        offsets = None
        if "weight_zero_point" in parts:
            zeros = unpack_bits(parts["weight_zero_point"].t().contiguous(), bits).t()[: len(packed)]
            offsets = -(zeros.float() * scales.float())
        numbers = unpack_bits(packed, bits)[:, :columns]
        return GroupedIntegers(bits, numbers, scales, offsets, parts.get("weight_g_idx"))
