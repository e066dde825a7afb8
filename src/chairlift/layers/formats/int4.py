"""Weights in 4-bit integers, in groups of neighbouring columns with a scale and an offset.

Plain weights are rounded in groups of 32 while they are loaded. Quantized checkpoints keep their own groups. On a CPU
with float32 activations, which are then rounded at every product, the weights become blocks (Q4_1); the embedding table
and the head have 8 bits there (Q8_0). Elsewhere activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.kernels.triton.int4.matrix import GROUPS, PANEL, Int4Matrix, can_store, dequantized, store
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import (
    ALONE,
    FormatTraits,
    Fusion,
    FusionPart,
    Product,
    WeightFormat,
    empty_in_place_of,
)
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.layers.rows import in_tiles
from chairlift.loading.stored_weight import GroupedIntegers, StoredWeight

GROUP = 32  # the smallest that the kernels have; larger ones take fewer bytes and lose more
# With more rows, dequantizing the weight once and multiplying in 16 bits is faster than dequantizing it in each tile.
MOST_TILED_ROWS = 256


@FORMATS.register("int4")
class Int4Weight(WeightFormat):
    """Maps whose sizes do not fit (rows not a multiple of 16, columns not of 32) stay plain, or become 8-bit blocks."""

    name = "int4"
    traits = FormatTraits(
        stores_head=False,
        heads=("blocks", "none"),
        keeps_blocks=True,
        expert_blocks="int4",
        fuses={"norm": MOST_TILED_ROWS, "norm and gate": MOST_TILED_ROWS},
    )

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        super().__init__(weight, shared=shared)
        self.matrix: Int4Matrix | None = None
        self._groups: GroupedIntegers | None = None  # These become blocks.

    @classmethod
    def obstacles(cls, dtype: torch.dtype, device: torch.device) -> list[str]:
        if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
            return [f"activations are bfloat16 or float16 with it on a GPU, not {dtype}"]
        return []

    @classmethod
    def stored_bytes(cls, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        if not can_store(out_features, in_features, GROUP):
            return super().stored_bytes(out_features, in_features, dtype)
        scales = 2 * torch.float16.itemsize  # a scale and an offset for each group
        return out_features * in_features * (0.5 + scales / GROUP)

    @classmethod
    def accepts(cls, parts: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> bool:
        return not cls.obstacles(dtype, device) and _merge(parts) is not None

    def finalized(self) -> WeightFormat:
        if BlockWeight.obstacles(self.dtype, self.device) or (self._groups is None and self.plain is None):
            return super().finalized()
        weight = empty_in_place_of(self, BlockWeight)
        if self._groups is None and self.plain is not None and (self.looked_up or self.in_features % GROUP):
            weight.plain = self.plain  # rounded to 8 bits
        else:
            weight.load_groups(self._groups or GroupedIntegers(4, *self._round(torch.float16)))
        self.plain = self._groups = None
        return weight.finalized()

    def load(self, parts: Sequence[StoredWeight]) -> None:
        merged = _merge(parts)
        assert merged is not None
        if not BlockWeight.obstacles(self.dtype, self.device):
            self._groups = merged
            return
        numbers, scales, offsets = (
            None if each is None else each.to(self.device) for each in (merged.numbers, merged.scales, merged.offsets)
        )
        assert numbers is not None
        assert scales is not None
        self.matrix = store(numbers, scales, offsets, _group(merged))
        self.plain = None

    def pack(self) -> None:
        if self.plain is None or self.looked_up or not can_store(self.out_features, self.in_features, GROUP):
            return
        self.matrix = store(*self._round(torch.float16 if self.dtype is torch.float16 else torch.bfloat16), GROUP)
        self.plain = None

    def _round(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        assert self.plain is not None
        return round_groups(self.plain, GROUP, dtype)

    @property
    def num_bytes(self) -> int:
        if self.matrix is not None:
            return self.matrix.nbytes
        assert self.plain is not None
        return self.plain.nbytes

    def scale_columns(self, factors: Tensor) -> bool:
        return False  # the factors of a group would need scales of their own

    def fuses(self, part: FusionPart, rows: int) -> bool:
        if part == "norm and gate" and self.out_features % (2 * PANEL):
            return False
        return self.matrix is not None and rows <= self.traits.fuses.get(part, 0)

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        in_kernel = not fusion.is_alone
        if on_gpu(x.device):
            in_kernel |= self.batch_invariant or len(x) <= MOST_TILED_ROWS
        if self.matrix is not None and in_kernel:
            from chairlift.kernels.triton.int4.product import int4_product

            result = int4_product(
                x.contiguous(),
                self.matrix,
                squares=fusion.squares,
                eps=fusion.eps,
                bias=fusion.bias,
                gated=fusion.gated,
                add_to=fusion.add_to,
                next_norm=fusion.next_norm,
                invariant=self.batch_invariant,
            )
            return Product(*result)
        weight = self._in_full(x.dtype)
        if self.batch_invariant:
            return Product(in_tiles(lambda rows: F.linear(rows, weight, fusion.bias), x))
        return Product(F.linear(x, weight, fusion.bias))

    def _in_full(self, dtype: torch.dtype) -> Tensor:
        if self.matrix is None:
            assert self.plain is not None
            return self.plain
        if on_gpu(self.matrix.words.device):
            from chairlift.kernels.triton.int4.product import dequantize

            return dequantize(self.matrix, dtype)
        return dequantized(self.matrix).to(dtype)


def _group(integers: GroupedIntegers) -> int:
    """The largest group that the kernels have and that divides the checkpoint's; 0 if there is none."""
    return next((group for group in GROUPS if integers.group_size % group == 0), 0)


def _merge(parts: Sequence[StoredWeight]) -> GroupedIntegers | None:
    """The weights one below the other with one group size, if the kernels can multiply them."""
    integers = [part.as_integers() for part in parts]
    weights = [each for each in integers if each is not None and each.bits == 4 and each.group_of is None]
    if len(weights) != len(parts) or 0 in (sizes := [_group(each) for each in weights]):
        return None
    group = min(sizes)
    if not can_store(sum(each.shape[0] for each in weights), weights[0].shape[1], group):
        return None
    scales = [_fine(each.scales, each.group_size // group) for each in weights]
    if len({each.dtype for each in scales}) > 1:
        scales = [each.to(torch.bfloat16) for each in scales]
    offsets = None
    if any(each.offsets is not None for each in weights):
        lows = [-8.0 * each.scales.float() if each.offsets is None else each.offsets for each in weights]
        fine = [_fine(low, each.group_size // group) for low, each in zip(lows, weights, strict=True)]
        offsets = torch.cat(fine).to(scales[0].dtype)
    return GroupedIntegers(4, torch.cat([each.numbers for each in weights]), torch.cat(scales), offsets)


def _fine(values: Tensor, repeats: int) -> Tensor:
    """The scales of larger groups for each of their parts, in 16 bits."""
    values = values if values.dtype in (torch.float16, torch.bfloat16) else values.to(torch.float16)
    return values.repeat_interleave(repeats, dim=1)


LARGEST = 15
# Shares of a group's range that the sixteen levels cover. Less than all of it clips the extremes and makes the steps
# between all others smaller; more candidates gain nothing that shows in a perplexity.
SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8)
SLAB = 2**24  # elements rounded at once; a GPU is busy with fewer only in part
CPU_SLAB = 2**18  # The temporaries of as many stay in a core's cache: several times as fast as from memory.


def round_groups(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], in groups of columns -> numbers [out, in] uint8, scales and offsets [out, groups] in `dtype`.

    A number n of a group stands for n * scale + offset.
    """
    out, columns = weight.shape
    numbers = torch.empty(out, columns, dtype=torch.uint8, device=weight.device)
    scales, offsets = (
        torch.empty(out, columns // group, dtype=dtype, device=weight.device) for _ in ("scales", "offsets")
    )
    rows = max(1, (SLAB if on_gpu(weight.device) else CPU_SLAB) // columns)
    for first in range(0, out, rows):
        part = slice(first, first + rows)
        groups = weight[part].float().unflatten(1, (-1, group))
        scale, offset = _best_grid(groups, dtype)
        numbers[part] = _levels(groups, scale, offset).to(torch.uint8).flatten(1)
        scales[part], offsets[part] = scale.squeeze(2).to(dtype), offset.squeeze(2).to(dtype)
    return numbers, scales, offsets


def _best_grid(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """groups [rows, groups, size] float32 -> scales and offsets [rows, groups, 1], rounded to `dtype`."""
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_offset = torch.zeros_like(low), torch.zeros_like(low)
    for share in SHARES:
        trim = (high - low) * ((1.0 - share) / 2)
        scale, offset = _refine(groups, (high - low - 2 * trim) / LARGEST, low + trim)
        scale, offset = scale.to(dtype).float(), offset.to(dtype).float()
        error = (_levels(groups, scale, offset) * scale + offset - groups).square_().sum(dim=2, keepdim=True)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
        best_error = torch.where(better, error, best_error)
    return best_scale, best_offset


def _levels(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """The nearest of 0 .. 15 steps from the offset; zero where the scale is zero."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return ((groups - offset) * inverse).round_().clamp_(0, LARGEST)


def _refine(groups: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and offset with the least squared error for the levels of the given ones (linear regression)."""
    levels = _levels(groups, scale, offset)
    mean, level_mean = groups.mean(dim=2, keepdim=True), levels.mean(dim=2, keepdim=True)
    spread = (levels - level_mean).square().sum(dim=2, keepdim=True)
    slope = ((levels - level_mean) * (groups - mean)).sum(dim=2, keepdim=True) / spread.clamp_min(1e-6)
    slope = torch.where(spread > 0, slope, scale)
    return slope, mean - slope * level_mean
