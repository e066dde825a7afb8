"""Linear recurrences token by token: for decodes, with or without drafts, and for decays per row of the state."""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping
from chairlift.kernels.triton.recurrent.gates import RawGates, step_gates, step_of
from chairlift.kernels.triton.recurrent.tiles import SlotBatch

COLUMNS = 32  # A program computes this many of the state.
FEW = 16  # rows of a sequence up to which token by token is faster than in chunks
ANY = 2**31 - 1  # rows


class StateRule(Protocol):
    """`layers.recurrent.recurrence.RecurrenceRule`."""

    @property
    def delta(self) -> bool: ...

    @property
    def normalize(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def eps(self) -> float: ...


@triton.jit
def unit_length(x, eps):
    """A vector scaled to length one."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def _recurrence_kernel(
    q_ptr,  # [T, key heads, DIM], rows `q_stride` apart
    k_ptr,
    v_ptr,  # [T, heads, columns]
    decay_ptr,  # [T, heads, 1 or DIM] float32; with RAW, what the step is computed from
    rate_ptr,  # [T, heads] float32; with RAW, before the sigmoid
    log_rate_ptr,  # [heads] float32; this and the next with RAW only
    bias_ptr,
    skip_ptr,  # [heads] float32
    state_ptr,  # [slots, heads, DIM, columns] float32
    starts_ptr,
    read_ptr,
    write_ptr,
    out_ptr,  # [T, heads, columns]
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    rate_stride,
    low,
    high,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a key head
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    MOST_ROWS: tl.constexpr,  # sequences with more are computed elsewhere
    DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WIDE_DECAY: tl.constexpr,
    RAW: tl.constexpr,
    HAS_RATE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    begin = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    has_work = (begin < end) & (end - begin <= MOST_ROWS)
    i = tl.arange(0, BLOCK_DIM)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < VALUES
    both = (i < DIM)[:, None] & inside[None, :]
    at = (head * DIM + i)[:, None] * VALUES + column[None, :]
    slot = tl.load(read_ptr + sequence).to(tl.int64)
    s = tl.load(state_ptr + slot * HEADS * DIM * VALUES + at, mask=both & (slot >= 0) & has_work, other=0.0)
    # No kernel of this step before this one writes the states of such sequences.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if has_work == 0:
        return
    for place in range(end - begin):
        row = begin.to(tl.int64) + place
        q = tl.load(q_ptr + row * q_stride + head // GROUP * DIM + i, mask=i < DIM, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * k_stride + head // GROUP * DIM + i, mask=i < DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_stride + head * VALUES + column, mask=inside, other=0.0).to(tl.float32)
        if NORMALIZE:
            q = unit_length(q, eps)
            k = unit_length(k, eps)
        if RAW:
            x = tl.load(decay_ptr + row * decay_stride + head).to(tl.float32)
            rate = step_of(x, tl.load(bias_ptr + head), low, high)
            s *= tl.exp(-tl.exp(tl.load(log_rate_ptr + head)) * rate)
            if HAS_RATE:
                rate = 1.0 / (1.0 + tl.exp(-tl.load(rate_ptr + row * rate_stride + head).to(tl.float32)))
        else:
            rate = tl.load(rate_ptr + row * rate_stride + head)
            if WIDE_DECAY:
                s *= tl.exp(tl.load(decay_ptr + row * decay_stride + head * DIM + i, mask=i < DIM, other=0.0))[:, None]
            else:
                s *= tl.exp(tl.load(decay_ptr + row * decay_stride + head))
        error = v
        if DELTA:
            error = v - tl.sum(k[:, None] * s, 0)
        s += k[:, None] * (rate * error)[None, :]
        out = tl.sum(q[:, None] * s, 0) * scale
        if HAS_SKIP:
            out += tl.load(skip_ptr + head) * v
        where = out_ptr + (row * HEADS + head) * VALUES + column
        tl.store(where, out.to(out_ptr.dtype.element_ty), mask=inside)
        target = tl.load(write_ptr + row).to(tl.int64)
        if target >= 0:
            tl.store(state_ptr + target * HEADS * DIM * VALUES + at, s, mask=both)


def run_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor] | RawGates,
    rule: StateRule,
    state: Tensor,
    batch: SlotBatch,
    skip: Tensor | None,
    *,
    sequential: bool,
) -> Tensor:
    """As `layers.recurrent.recurrence.LinearRecurrence`; q, k, v may be columns of wider tensors.

    `sequential`: compute long sequences token by token as well, so that chunks do not change a bit.
    """
    heads, values = v.shape[1:]
    key_heads, dim = q.shape[1:]
    out = empty_rows(len(v), heads, values, dtype=v.dtype, device=v.device)
    wide = (gates.width if isinstance(gates, RawGates) else gates[0].shape[2]) > 1
    in_chunks = batch.longest > FEW and not wide and not sequential
    if isinstance(gates, RawGates) and (in_chunks or wide):
        gates = step_gates(gates)
    raw = gates if isinstance(gates, RawGates) else None
    decay, given_rate = gates[:2]
    rate = decay if given_rate is None else given_rate
    if in_chunks:
        from chairlift.kernels.triton.recurrent.chunked import run_chunks

        run_chunks(q, k, v, decay, rate, rule, state, batch, skip, out, more_than=FEW)
    columns = min(COLUMNS, next_power_of_2(values))
    _recurrence_kernel[(len(batch.read) * heads, cdiv(values, columns))](
        q,
        k,
        v,
        decay,
        rate,
        decay if raw is None else raw.log_rate,
        decay if raw is None else raw.bias,
        state if skip is None else skip,
        state,
        batch.starts,
        batch.read,
        batch.write,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        decay.stride(0),
        rate.stride(0),
        *((0.0, 0.0) if raw is None else raw.limits),
        rule.scale,
        rule.eps,
        HEADS=heads,
        GROUP=heads // key_heads,
        DIM=dim,
        VALUES=values,
        MOST_ROWS=FEW if in_chunks else ANY,
        DELTA=rule.delta,
        NORMALIZE=rule.normalize,
        WIDE_DECAY=wide,
        RAW=raw is not None,
        HAS_RATE=given_rate is not None,
        HAS_SKIP=skip is not None,
        BLOCK_DIM=next_power_of_2(dim),
        COLUMNS=columns,
        num_warps=4,
        **overlapping(v.device),
    )
    return out
