"""GPTQ: integers of 2, 4 or 8 bits with a scale and a zero point for each group of input features.

With act-order (`desc_act`) the columns of a group are not neighbours. Such a weight is dequantized when it is loaded:
the 4-bit kernels need groups of neighbours; sorting the columns would mean to gather the activations of every product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, by_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight


@READERS.register("gptq")
class GPTQReader(QuantizedReader):
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._bits = self.integer("bits")
        layout = config.get("checkpoint_format", "gptq")
        if self._bits not in (2, 4, 8):
            raise self.refuse(f"weights of {self._bits} bits are not supported, only of 2, 4 and 8")
        if layout not in ("gptq", "gptq_v2"):
            raise self.refuse(f"its layout {layout!r} is not supported, only 'gptq' and 'gptq_v2'")
        overrides = [rule for rule in config.get("dynamic") or {} if not str(rule).startswith("-:")]
        if overrides:
            raise self.refuse(f"settings of single modules (dynamic: {overrides[0]!r:.60}) are not supported")
        self._zero_shift = 1 if layout == "gptq" else 0  # the first layout stores zero points less one

    def description(self) -> str:
        order = ", act-order" if self.config.get("desc_act") else ""
        return f"GPTQ, {self._bits}-bit integers in groups of {self.config.get('group_size')}{order}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return by_suffix(names, ("qweight", "qzeros", "scales"), ("g_idx",))

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        from chairlift.loading.stored_weight import GroupedIntegers, unpack_bits

        numbers = unpack_bits(parts["qweight"].t().contiguous(), self._bits)  # [out, in]
        scales = parts["scales"].t().contiguous()  # [out, groups]
        zeros = unpack_bits(parts["qzeros"], self._bits).t()[: len(scales)]
        levels = zeros.float() + self._zero_shift
        symmetric = levels.shape == scales.shape and bool((levels == 2 ** (self._bits - 1)).all())
        offsets = None if symmetric else -(levels * scales.float())
        return GroupedIntegers(self._bits, numbers, scales, offsets, _groups(parts.get("g_idx"), scales.shape[1]))


def _groups(group_of: Tensor | None, groups: int) -> Tensor | None:
    """The group of each column; None if groups are runs of neighbours."""
    if group_of is None:
        return None
    runs = torch.arange(len(group_of)) // (len(group_of) // groups)
    return None if torch.equal(runs, group_of.long()) else group_of
