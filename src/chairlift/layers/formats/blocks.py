"""Weights on a CPU in the blocks of GGUF files: integers of 4 to 8 bits with a scale for every 16 or 32 columns.

Blocks of a file are kept as they are. Weights in other forms become blocks of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import ALONE, FormatTraits, Fusion, Product, WeightFormat, cpu_kernel_obstacles
from chairlift.loading.gguf.blocks import GGUFWeight
from chairlift.loading.stored_weight import GroupedIntegers, StoredWeight
from chairlift.loading.weight_cache.cache_file import PackedArray

PANEL = 16  # output channels that are stored together
GROUP = 32  # columns of the smallest blocks


@FORMATS.register("blocks")
class BlockWeight(WeightFormat):
    """Products are batch-invariant by construction: every row has scales of its own, and integer sums are exact."""

    name = "blocks"
    # Rounding the cache to half its size loses less than rounding the weights.
    traits = FormatTraits(devices=("cpu",), kv_dtype=torch.bfloat16, keeps_blocks=True, expert_blocks="blocks")

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self._parts: list[tuple[str, np.ndarray]] = []  # the kind and the panels of each part, in order

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        return cpu_kernel_obstacles(dtype, device)

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        return out_features * in_features * (1 + 2 / GROUP)  # what is not in blocks yet gets 8 bits

    @classmethod
    def accepts(cls, parts: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> bool:
        whole = all(part.shape[0] % PANEL == 0 for part in parts[:-1])
        fit = all(part.shape[1] % GROUP == 0 for part in parts)  # whole blocks
        return whole and fit and not cls.obstacles(dtype, device) and all(part.block_kind for part in parts)

    @staticmethod
    def bytes_of(weight: GGUFWeight) -> int:
        """The bytes of a weight's panels."""
        from chairlift.kernels.cpu.blocks.panels import KINDS

        kind = KINDS.get(weight.kind, KINDS["Q8_0"])
        return -(-weight.shape[0] // PANEL) * kind.panel_bytes(weight.shape[1])

    def load(self, parts: Sequence[StoredWeight]) -> None:
        from chairlift.kernels.cpu.blocks.panels import KINDS

        for part in parts:
            if part.block_kind in KINDS:
                self._add(part.block_kind, *part.block_rows())
            else:
                self._add("Q8_0", _rows_of_8_bits(part.dequantized().numpy()))
        self._join()

    def load_groups(self, groups: GroupedIntegers) -> None:
        """Take 4-bit integers with a scale and an offset for every 32 columns, or a multiple of them."""
        self._add("Q4_1", _rows_of_4_bits(groups))
        self._join()

    def pack(self) -> None:
        if self.plain is not None:
            self._add("Q8_0", _rows_of_8_bits(self.plain.float().numpy()))
            self._join()

    def _add(self, kind: str, rows: np.ndarray, order: np.ndarray | None = None) -> None:
        from chairlift.kernels.cpu.blocks.panels import KINDS, pack

        self._parts.append((kind, pack(KINDS[kind], rows, order)))

    def _join(self) -> None:
        from chairlift.kernels.cpu.blocks.panels import KINDS
        from chairlift.kernels.cpu.blocks.product import PanelWeight

        tables = [PanelWeight.of(KINDS[kind], panels, self.in_features).panels for kind, panels in self._parts]
        self.panels = PanelWeight(np.concatenate(tables))
        self.plain = None

    def packed_arrays(self) -> list[PackedArray]:
        return [PackedArray(kind, panels) for kind, panels in self._parts]

    def use_arrays(self, arrays: Sequence[PackedArray]) -> None:
        from chairlift.kernels.cpu.blocks.panels import KINDS

        for array in arrays:
            kind = KINDS.get(array.label)
            size = None if kind is None else kind.panel_bytes(self.in_features)
            if array.values.dtype != np.uint8 or array.values.shape[1:] != (size,):
                raise ValueError(f"panels of {array.label} do not fit")
        if sum(len(array.values) for array in arrays) != -(-self.out_features // PANEL):
            raise ValueError("panels are missing")
        if self.looked_up and len(arrays) != 1:
            raise ValueError("an embedding table must be stored in one part")
        self._parts = [(array.label, array.values) for array in arrays]
        self._join()

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self._parts]

    @property
    def num_bytes(self) -> int:
        return sum(panels.nbytes for _, panels in self._parts)

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows of the weight [indices, in_features], in float32; of a weight that was stored in one part."""
        from chairlift.kernels.cpu.blocks.panels import KINDS, unpack

        ((kind, panels),) = self._parts
        return torch.from_numpy(unpack(KINDS[kind], panels, indices.numpy(), self.in_features))

    @property
    def keeps_row_bits(self) -> bool:
        return True

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        from chairlift.kernels.cpu.blocks.product import linear_panels
        from chairlift.kernels.cpu.weights import multiplied

        assert self.panels is not None
        return Product(multiplied(linear_panels, x, self.panels, fusion.bias, self.out_features))


def _rows_of_4_bits(groups: GroupedIntegers) -> np.ndarray:
    """Blocks Q4_1 [rows, bytes] of the same numbers, with scales and offsets in float16."""
    rows, columns = groups.shape
    repeats = groups.group_size // GROUP
    scales = groups.scales.float()
    offsets = -8.0 * scales if groups.offsets is None else groups.offsets.float()
    both = torch.stack([scales, offsets], dim=-1).half().repeat_interleave(repeats, dim=1)  # [rows, groups, 2]
    low, high = groups.numbers.numpy().reshape(rows, columns // GROUP, 2, GROUP // 2).swapaxes(0, 2).swapaxes(1, 2)
    blocks: np.ndarray = np.concatenate([both.numpy().view(np.uint8), low | high << 4], axis=-1)
    return blocks.reshape(rows, -1)


def _rows_of_8_bits(weight: np.ndarray) -> np.ndarray:
    """Round [rows, columns] to blocks Q8_0 [rows, bytes]."""
    rows, columns = weight.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), dtype=np.float32)
    padded[:, :columns] = weight
    groups = padded.reshape(rows, -1, GROUP)
    scales = (np.abs(groups).max(axis=2, keepdims=True) / 127).astype(np.float16)
    wide = scales.astype(np.float32)
    factors = np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)
    numbers = np.rint(groups * factors).clip(-127, 127).astype(np.int8)
    blocks: np.ndarray = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=-1)
    return blocks.reshape(rows, -1)
