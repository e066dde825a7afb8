"""Kernels around the passes of draft networks.

The input of a pass is the embedding of each token beside a state, both scaled to a mean square of one. What a head
reads of a step, the hidden states of each row, is stored by request and position.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows, row_options


@triton.jit
def _draft_inputs_kernel(
    tokens_ptr,  # [T] int32 or int64
    table_ptr,  # [vocab, size]
    states_ptr,  # [T, size]
    out_ptr,  # [T, 2 * size]
    scale,
    eps,
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens_ptr + row).to(tl.int64)
    kind = out_ptr.dtype.element_ty
    embedded = tl.load(table_ptr + token * size + column, mask=inside, other=0.0).to(tl.float32) * scale
    embedded = embedded.to(kind).to(tl.float32)
    state = tl.load(states_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    to = out_ptr + row * 2 * size + column
    tl.store(to, (embedded * tl.rsqrt(tl.sum(embedded * embedded, 0) / size + eps)).to(kind), mask=inside)
    tl.store(to + size, (state * tl.rsqrt(tl.sum(state * state, 0) / size + eps)).to(kind), mask=inside)


def draft_inputs(tokens: Tensor, table: Tensor, scale: float, states: Tensor, eps: float) -> Tensor:
    """tokens [T], table [vocab, size], states [T, size] -> [T, 2 * size]."""
    count, size = states.shape
    out = empty_rows(count, 2 * size, dtype=states.dtype, device=states.device)
    _draft_inputs_kernel[(count,)](
        tokens,
        table,
        states,
        out,
        scale,
        eps,
        size,
        **row_options(size, states.device, 8),
    )
    return out


PARTS = 3  # One launch stores this many.


@triton.jit
def _store_states_kernel(
    first_ptr,  # [T, size]
    second_ptr,  # It is read if COUNT is above 1.
    third_ptr,  # It is read if COUNT is above 2.
    slots_ptr,  # [T] int32
    positions_ptr,  # [T] int32; -1: padding
    out_ptr,  # [slots * LENGTH, width]
    size,
    width,
    at,  # the first column
    COUNT: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    # The rows of a request lie side by side: of a long chunk, only the last LENGTH rows are kept.
    later = row + LENGTH
    exists = later < tl.num_programs(0)
    later_slot = tl.load(slots_ptr + later, mask=exists, other=-1)
    later_position = tl.load(positions_ptr + later, mask=exists, other=-1)
    replaced = (later_slot == slot) & (later_position == position + LENGTH)
    kept = (column < size) & (position >= 0) & (replaced == 0)
    source = row.to(tl.int64) * size + column
    target = out_ptr + (slot.to(tl.int64) * LENGTH + position % LENGTH) * width + at + column
    tl.store(target, tl.load(first_ptr + source, mask=kept, other=0.0), mask=kept)
    if COUNT > 1:
        tl.store(target + size, tl.load(second_ptr + source, mask=kept, other=0.0), mask=kept)
    if COUNT > 2:
        tl.store(target + 2 * size, tl.load(third_ptr + source, mask=kept, other=0.0), mask=kept)


def store_states(parts: Sequence[Tensor], slots: Tensor, positions: Tensor, out: Tensor, length: int) -> None:
    """parts [T, size] each, slots and positions [T] int32 -> row `slot * length + position % length` of out
    [..., parts * size]. Rows of padding have the position -1."""
    size = parts[0].shape[1]
    for begin in range(0, len(parts), PARTS):
        some = [part.contiguous() for part in parts[begin : begin + PARTS]]
        _store_states_kernel[(len(some[0]),)](
            *(some + some[-1:] * (PARTS - len(some))),
            slots,
            positions,
            out,
            size,
            out.shape[1],
            begin * size,
            COUNT=len(some),
            LENGTH=length,
            **row_options(size, out.device, 8),
        )
