"""The short causal convolution of recurrent layers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.launch import cdiv, empty_rows, next_power_of_2, overlapping
from chairlift.kernels.triton.recurrent.recurrence import SlotBatch, find_tile, num_tiles, search_width

ROWS = 32  # A tile has this many, more than any filter is wide.
FEW = 8  # rows of a tile where no sequence has more: decodes, with or without drafts
CHANNELS = 128  # A tile has this many.


@triton.jit(do_not_specialize=["num_sequences"])
def _convolve_kernel(
    x_ptr,  # [T, channels], rows `x_stride` apart
    weight_ptr,  # [WIDTH, channels] float32
    bias_ptr,
    state_ptr,  # [slots, WIDTH - 1, channels] float32
    starts_ptr,
    read_ptr,
    write_ptr,
    out_ptr,  # [T, channels]
    num_sequences,
    x_stride,
    channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Convolves a tile. The first tile of a sequence, which alone reads its state, also keeps the states due in it."""
    sequence, offset, begin, end = find_tile(starts_ptr, tl.program_id(0), num_sequences, ROWS, ONE_EACH, SEQUENCES)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if begin + offset >= end:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    place = offset + tl.arange(0, ROWS)  # It counts from the sequence's first row of this step.
    row = (begin + place).to(tl.int64)
    present = begin + place < end
    slot = tl.load(read_ptr + sequence).to(tl.int64)
    kept = state_ptr + slot * (WIDTH - 1) * channels + channel[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + tap * channels + channel, mask=inside, other=0.0)
        back = WIDTH - 1 - tap
        new = present & (place >= back)
        value = tl.load(
            x_ptr + (row - back)[:, None] * x_stride + channel[None, :], mask=new[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        if tap < WIDTH - 1:
            old = present & (place < back) & (slot >= 0)
            value += tl.load(kept + (tap + place)[:, None] * channels, mask=old[:, None] & inside[None, :], other=0.0)
        total += weight[None, :] * value
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    out_at = out_ptr + row[:, None] * channels + channel[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])
    if offset == 0:
        # The slot that the sequence reads may be among those it writes. Entry `tap` of a new state depends on later
        # entries of the old one only, so after the loads above, the order of the taps is enough.
        tl.debug_barrier()
        target = tl.load(write_ptr + row, mask=present, other=-1).to(tl.int64)
        for tap in tl.static_range(WIDTH - 1):
            back = WIDTH - 2 - tap
            due = present & (target >= 0)
            value = tl.load(
                x_ptr + (row - back)[:, None] * x_stride + channel[None, :],
                mask=(due & (place >= back))[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            old = due & (place < back) & (slot >= 0)
            value += tl.load(
                kept + (tap + 1 + place)[:, None] * channels, mask=old[:, None] & inside[None, :], other=0.0
            )
            at = state_ptr + (target * (WIDTH - 1) + tap)[:, None] * channels + channel[None, :]
            tl.store(at, value, mask=due[:, None] & inside[None, :])
            tl.debug_barrier()


@triton.jit(do_not_specialize=["num_sequences"])
def _keep_kernel(
    x_ptr,
    state_ptr,
    starts_ptr,
    write_ptr,
    num_sequences,
    x_stride,
    channels,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keeps the states that are due in later tiles, once all first tiles have read theirs."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, offset, begin, end = find_tile(starts_ptr, tl.program_id(0), num_sequences, ROWS, False, SEQUENCES)
    if (offset == 0) | (begin + offset >= end):
        return
    row = (begin + offset + tl.arange(0, ROWS)).to(tl.int64)
    target = tl.load(write_ptr + row, mask=row < end, other=-1).to(tl.int64)
    if tl.max(target, 0) < 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    wanted = (target >= 0)[:, None] & (channel < channels)[None, :]
    for tap in tl.static_range(WIDTH - 1):
        source = x_ptr + (row - (WIDTH - 2 - tap))[:, None] * x_stride + channel[None, :]
        at = state_ptr + (target * (WIDTH - 1) + tap)[:, None] * channels + channel[None, :]
        tl.store(at, tl.load(source, mask=wanted, other=0.0).to(tl.float32), mask=wanted)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: SlotBatch, *, silu: bool) -> Tensor:
    """x [T, channels], maybe columns of a wider tensor -> [T, channels] of its type; padding rows stay undefined."""
    width, channels = weight.shape
    out = empty_rows(len(x), channels, dtype=x.dtype, device=x.device)
    one_each = batch.longest <= ROWS
    rows = FEW if batch.longest <= FEW else ROWS
    grid = (num_tiles(batch, rows), cdiv(channels, CHANNELS))
    options = {
        "WIDTH": width,
        "ROWS": max(rows, next_power_of_2(width)),
        "CHANNELS": CHANNELS,
        "SEQUENCES": search_width(batch),
        "num_warps": 4,
    } | overlapping(x.device)
    _convolve_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        state,
        batch.starts,
        batch.read,
        batch.write,
        out,
        len(batch.read),
        x.stride(0),
        channels,
        HAS_BIAS=bias is not None,
        SILU=silu,
        ONE_EACH=one_each,
        **options,
    )
    if not one_each:
        _keep_kernel[grid](x, state, batch.starts, batch.write, len(batch.read), x.stride(0), channels, **options)
    return out
