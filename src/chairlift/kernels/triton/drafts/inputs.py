"""The input of a draft head: the embedding of each token beside a state, both scaled to a mean square of one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows, next_power_of_2, overlapping


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
    block = next_power_of_2(size)
    _draft_inputs_kernel[(count,)](
        tokens,
        table,
        states,
        out,
        scale,
        eps,
        size,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
        **overlapping(states.device),
    )
    return out
