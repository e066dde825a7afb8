"""What a compiled step does with weights of any format: one name for each operation, chosen by the weights' type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from chairlift.kernels.cpu.bfloat16 import HalfRows, HalfWeight, multiply_halves, round_half_row
from chairlift.kernels.cpu.blocks.product import PanelWeight, multiply_panels
from chairlift.kernels.cpu.blocks.rows import BlockRows, round_block_row
from chairlift.kernels.cpu.int8 import PackedWeight, Rows, multiply, round_row
from chairlift.kernels.cpu.threads import the_team

TileWeight = PackedWeight | HalfWeight
StepWeight = TileWeight | PanelWeight
StepRows = Rows | HalfRows | BlockRows
ROW_TYPES: dict[type[StepWeight], type[StepRows]] = {PackedWeight: Rows, HalfWeight: HalfRows, PanelWeight: BlockRows}
_ROUND: dict[type[StepRows], Any] = {Rows: round_row, HalfRows: round_half_row, BlockRows: round_block_row}
NO_BIAS = np.empty(0, dtype=np.float32)
FEW_ROWS = 64  # No more are kept between products: allocating them takes longer than rounding one row.


_few_rows: dict[tuple[type[StepWeight], int], StepRows] = {}  # The key has the depth; the team computes one at a time.


def multiplied(
    kernel: Callable[..., None], x: Tensor, weight: StepWeight, bias: Tensor | None, out_features: int
) -> Tensor:
    """Multiply x [..., depth] float32 by a weight with `kernel`; returns [..., out_features]."""
    flat = np.ascontiguousarray(x.numpy().reshape(-1, x.shape[-1]))
    out = np.empty((len(flat), out_features), dtype=np.float32)
    added = NO_BIAS if bias is None else bias.numpy()
    the_team().run(kernel, flat, _room_for(type(weight), *flat.shape), weight, added, out)
    return torch.from_numpy(out.reshape(*x.shape[:-1], out_features))


def _room_for(weight: type[StepWeight], rows: int, depth: int) -> StepRows:
    """Memory for at least this many rounded rows, which the next call may return again."""
    if rows > FEW_ROWS:
        return ROW_TYPES[weight].empty(rows, depth)
    kept = _few_rows.get((weight, depth))
    if kept is None or len(kept.numbers) < rows:
        kept = _few_rows[weight, depth] = ROW_TYPES[weight].empty(rows, depth)
    return kept


def layer_of(weight: StepWeight, layer: int) -> StepWeight:
    """The weight of one layer."""
    raise NotImplementedError("compiled code only")


def times(
    shared: Any, members: int, rows: StepRows, count: int, weight: StepWeight, bias: Any, adding: bool, out: Any
) -> None:
    """out [count, channels] = (or +=) rows times weight + bias. All threads of the team call this."""
    raise NotImplementedError("compiled code only")


def round_into(values: Any, rows: StepRows, row: int) -> None:
    """Round `values` [depth] float32 into a row."""
    raise NotImplementedError("compiled code only")


@overload(layer_of, strict=False)
def _layer_of(weight: Any, layer: Any) -> Any:
    if weight.instance_class is PackedWeight:
        return lambda weight, layer: PackedWeight(weight.numbers[layer], weight.scales[layer])
    if weight.instance_class is HalfWeight:
        return lambda weight, layer: HalfWeight(weight.numbers[layer])
    return lambda weight, layer: PanelWeight(weight.panels[layer])


@overload(times, strict=False)
def _times(shared: Any, members: Any, rows: Any, count: Any, weight: Any, bias: Any, adding: Any, out: Any) -> Any:
    if weight.instance_class is PackedWeight:
        return lambda shared, members, rows, count, weight, bias, adding, out: multiply(
            shared, rows, count, weight, bias, adding, out
        )
    product = multiply_halves if weight.instance_class is HalfWeight else multiply_panels
    return lambda shared, members, rows, count, weight, bias, adding, out: product(
        shared, members, rows, count, weight, bias, adding, out
    )


@overload(round_into, strict=False)
def _round_into(values: Any, rows: Any, row: Any) -> Any:
    rounded = _ROUND[rows.instance_class]
    return lambda values, rows, row: rounded(values, rows, row)
