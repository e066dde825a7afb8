"""What a compiled step does with weights of any format: one name for each operation, chosen by the weights' type."""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from chairlift.kernels.cpu.blocks.product import PanelWeight, multiply_panels
from chairlift.kernels.cpu.blocks.rows import BlockRows, round_block_row
from chairlift.kernels.cpu.int8 import PackedWeight, Rows, multiply, round_row

StepWeight = PackedWeight | PanelWeight
StepRows = Rows | BlockRows


def layer_of(weight: StepWeight, layer: int) -> StepWeight:
    """The weight of one layer."""
    raise NotImplementedError("compiled code only")


def times(
    shared: Any, members: int, rows: StepRows, count: int, weight: StepWeight, bias: Any, adding: bool, out: Any
) -> None:
    """out [count, channels] = (or +=) rows times weight + bias. All threads of the team call this."""
    raise NotImplementedError("compiled code only")


def round_into(values: Any, rows: StepRows, row: int) -> None:
    """Quantize `values` [depth] float32 into a row."""
    raise NotImplementedError("compiled code only")


@overload(layer_of, strict=False)
def _layer_of(weight: Any, layer: Any) -> Any:
    if weight.instance_class is PackedWeight:
        return lambda weight, layer: PackedWeight(weight.numbers[layer], weight.scales[layer])
    return lambda weight, layer: PanelWeight(weight.panels[layer])


@overload(times, strict=False)
def _times(shared: Any, members: Any, rows: Any, count: Any, weight: Any, bias: Any, adding: Any, out: Any) -> Any:
    if weight.instance_class is PackedWeight:
        return lambda shared, members, rows, count, weight, bias, adding, out: multiply(
            shared, rows, count, weight, bias, adding, out
        )
    return lambda shared, members, rows, count, weight, bias, adding, out: multiply_panels(
        shared, members, rows, count, weight, bias, adding, out
    )


@overload(round_into, strict=False)
def _round_into(values: Any, rows: Any, row: Any) -> Any:
    rounded = round_row if rows.instance_class is Rows else round_block_row
    return lambda values, rows, row: rounded(values, rows, row)
