"""Linear recurrences token by token: for decodes, with or without drafts, and for decays per row of the state.

All kernels of recurrent layers find their rows by tiles. A tile is some consecutive rows of one sequence, counted from
the sequence's first row of the step. Programs find their tile from `starts` in device memory, so that a captured step
serves any split of its rows into sequences.
"""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping
from chairlift.kernels.triton.recurrent.gates import RawGates, step_gates, step_of

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


class SlotBatch(Protocol):
    """`attention.recurrent.RecurrentBatch`."""

    @property
    def starts(self) -> Tensor: ...

    @property
    def read(self) -> Tensor: ...

    @property
    def write(self) -> Tensor: ...

    @property
    def longest(self) -> int: ...


def num_tiles(batch: SlotBatch, rows: int) -> int:
    """No fewer tiles than the batch has, whatever its split into sequences is."""
    sequences = len(batch.read)
    return sequences if batch.longest <= rows else cdiv(len(batch.write), rows) + sequences


def search_width(batch: SlotBatch) -> int:
    """The `SEQUENCES` argument of `find_tile`."""
    return next_power_of_2(len(batch.read))


@triton.jit
def find_tile(
    starts_ptr,
    tile,
    num_sequences,
    ROWS: tl.constexpr,  # A tile has this many.
    ONE_EACH: tl.constexpr,  # no sequence has more than one tile: tile i is that of sequence i
    SEQUENCES: tl.constexpr,
):
    """The sequence of a tile (num_sequences if there is no such tile), its first row, and the sequence's rows."""
    if ONE_EACH:
        sequence = tile
        offset = 0
    else:
        each = tl.arange(0, SEQUENCES)
        known = each < num_sequences
        first = tl.load(starts_ptr + each, mask=known, other=0)
        after = tl.load(starts_ptr + each + 1, mask=known, other=0)
        tiles = tl.where(known, (after - first + ROWS - 1) // ROWS, 0)
        ends = tl.cumsum(tiles, 0)
        sequence = tl.sum((known & (ends <= tile)).to(tl.int32), 0)
        offset = (tile - tl.sum(tl.where(each < sequence, tiles, 0), 0)) * ROWS
    inside = sequence < num_sequences
    begin = tl.load(starts_ptr + sequence, mask=inside, other=0)
    end = tl.load(starts_ptr + sequence + 1, mask=inside, other=0)
    return sequence, offset, begin, end
