"""AWQ: 4-bit integers with a scale and a zero point for each group of input features ("gemm" layout)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, by_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight

BITS = 4
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight columns


@READERS.register("awq")
class AWQReader(QuantizedReader):
    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        bits = self.integer("bits" if "bits" in config else "w_bit", BITS)
        version = str(config.get("version", "gemm")).lower()
        if bits != BITS:
            raise self.refuse(f"weights of {bits} bits are not supported, only of 4")
        if version != "gemm":
            raise self.refuse(f"its layout {version!r} is not supported, only 'gemm'")

    def description(self) -> str:
        return f"AWQ, 4-bit integers in groups of {self.config.get('group_size', self.config.get('q_group_size'))}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return by_suffix(names, ("qweight", "scales"), ("qzeros",))

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        from chairlift.loading.stored_weight import GroupedIntegers

        numbers, scales = _in_order(parts["qweight"]), parts["scales"]  # [in, out], [groups, out]
        scales = scales.t().contiguous()
        offsets = -(_in_order(parts["qzeros"]).t().float() * scales.float()) if "qzeros" in parts else None
        return GroupedIntegers(BITS, numbers.t().contiguous(), scales, offsets)


def _in_order(words: Tensor) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n]."""
    from chairlift.loading.stored_weight import unpack_bits

    numbers: Tensor = unpack_bits(words, BITS).unflatten(1, (-1, 8))
    return numbers[..., ORDER].flatten(1)
