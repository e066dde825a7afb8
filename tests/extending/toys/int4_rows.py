"""A weight format: 4-bit integers with a scale per output channel, unpacked for every product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ALONE, FormatTraits, Fusion, Product, WeightFormat
from chairlift.layers.rows import in_tiles


@FORMATS.register("int4-rows")
class Int4Weight(WeightFormat):
    name = "int4-rows"
    traits = FormatTraits(stores_head=False)  # a head in 4 bits costs more quality than it saves memory

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        return [] if dtype is torch.float32 else [f"activations are float32 with it, not {dtype}"]

    def pack(self) -> None:
        if self.plain is None:  # packed already
            return
        self.scales = self.plain.abs().amax(dim=1, keepdim=True) / 7
        numbers = (F.pad(self.plain, (0, self.in_features % 2)) / self.scales).round().nan_to_num() + 8
        even, odd = numbers.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
        self.pairs = even | odd << 4  # [out_features, in_features / 2]
        self.plain = None

    @property
    def num_bytes(self) -> int:
        return self.pairs.nbytes + self.scales.nbytes

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        numbers = torch.stack((self.pairs & 15, self.pairs >> 4), dim=-1).flatten(1)[:, : self.in_features]
        weight = (numbers.float() - 8) * self.scales
        if self.batch_invariant:  # torch sums in an order that depends on the number of rows
            return Product(in_tiles(lambda rows: F.linear(rows, weight, fusion.bias), x))
        return Product(F.linear(x, weight, fusion.bias))
