"""A reader of checkpoints whose weights are -1, 0 or 1 times a scale, stored as the bytes 0, 1 and 2."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, by_suffix
from chairlift.loading.stored_weight import PlainValues, StoredWeight


@READERS.register("ternary")
class TernaryReader(QuantizedReader):
    name = "ternary"

    def description(self) -> str:
        return "ternary weights"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return by_suffix(names, ("codes", "scale"))

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        return PlainValues((parts["codes"].float() - 1) * parts["scale"])
