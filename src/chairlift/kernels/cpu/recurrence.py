"""Causal convolutions and linear recurrences of recurrent layers, for a team of threads.

A recurrent layer keeps a matrix S for each head, and every token changes it:

    S <- decay * S + rate * k (v - kᵀS)ᵀ     the delta rule (gated delta net, KDA)
    S <- decay * S + rate * k vᵀ             without it (Mamba 2: k is B, q is C, rate is the time step)
    o = qᵀS

The columns of S do not depend on each other, so a thread takes some columns of one head of one sequence through all of
its tokens, in a copy that stays in the first cache. The order of every sum is fixed: a token's numbers do not depend on
the rest of the batch, nor on how a prompt is cut into chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chairlift.kernels.cpu.compiling import FAST, compiled, compiled_and_kept, exp, widen
from chairlift.kernels.cpu.threads import claim, the_team

COLUMNS = 32  # A work item computes this many of S: 128 rows of them are 16 KB.
CHANNELS = 256  # A work item computes this many of a convolution.
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


class Sequences(NamedTuple):
    """Which rows belong to which sequence, and the slots of states; -1: no slot."""

    starts: np.ndarray  # [S + 1] int32
    read: np.ndarray  # [S] int32
    write: np.ndarray  # [T] int32


class Rule(NamedTuple):
    """What a recurrence does with its inputs."""

    delta: bool
    normalize: bool  # scale queries and keys to length one
    scale: np.float32  # Queries are multiplied by it.
    eps: np.float32  # added to the squared length


@compiled_and_kept({"contract"})
def convolve(
    shared: Any, members: int, x: Any, weight: Any, bias: Any, silu: bool, state: Any, seqs: Sequences, out: Any
) -> None:
    """A causal convolution of every channel with its own filter, then silu or nothing.

    x [T, channels] float32 or bfloat16 (as uint16), all else float32: weight [width, channels], bias [channels or 0],
    state [slots, width - 1, channels], the last inputs, oldest first, out [T, channels].
    """
    width, channels = weight.shape
    blocks = (channels + CHANNELS - 1) // CHANNELS
    recent = np.empty((width, CHANNELS), dtype=np.float32)
    while True:
        item = claim(shared, 1)
        if item >= (seqs.starts.shape[0] - 1) * blocks:
            return
        sequence, first = item // blocks, item % blocks * CHANNELS
        count = min(CHANNELS, channels - first)
        _begin_inputs(state, seqs.read[sequence], first, count, recent)
        for row in range(seqs.starts[sequence], seqs.starts[sequence + 1]):
            for c in range(count):
                recent[width - 1, c] = widen(x[row, first + c])
            _filter(recent, weight, bias, first, count, silu, row, out)
            for tap in range(width - 1):
                for c in range(count):
                    recent[tap, c] = recent[tap + 1, c]
            if seqs.write[row] >= 0:
                _keep_inputs(recent, first, count, state, seqs.write[row])


@compiled()
def _begin_inputs(state: Any, slot: int, first: int, count: int, recent: Any) -> None:
    for tap in range(state.shape[1]):
        for c in range(count):
            recent[tap, c] = state[slot, tap, first + c] if slot >= 0 else _ZERO


@compiled()
def _keep_inputs(recent: Any, first: int, count: int, state: Any, slot: int) -> None:
    for tap in range(state.shape[1]):
        for c in range(count):
            state[slot, tap, first + c] = recent[tap, c]


@compiled({"contract"})
def _filter(recent: Any, weight: Any, bias: Any, first: int, count: int, silu: bool, row: int, out: Any) -> None:
    for c in range(count):
        out[row, first + c] = bias[first + c] if bias.shape[0] > 0 else _ZERO
    for tap in range(weight.shape[0]):
        for c in range(count):
            out[row, first + c] += weight[tap, first + c] * recent[tap, c]
    if silu:
        for c in range(count):
            value = out[row, first + c]
            out[row, first + c] = value / (_ONE + exp(-value))


@compiled_and_kept(FAST)
def recur(
    shared: Any,
    members: int,
    q: Any,
    k: Any,
    v: Any,
    decay: Any,
    rate: Any,
    skip: Any,
    rule: Rule,
    state: Any,
    seqs: Sequences,
    out: Any,
) -> None:
    """Run a linear recurrence; all float32.

    q, k [T, key heads, d_k]; v, out [T, heads, d_v]; decay [T, heads, 1 or d_k], the logarithm; rate [T, heads]; skip
    [heads], multiples of v to add; state [slots, heads, d_k, d_v]. Consecutive heads share a key head.
    """
    heads, dim, columns = v.shape[1], q.shape[2], v.shape[2]
    blocks = (columns + COLUMNS - 1) // COLUMNS
    group = heads // q.shape[1]
    part = np.zeros((dim, COLUMNS), dtype=np.float32)
    sums = np.zeros((2, COLUMNS), dtype=np.float32)  # what S predicts for the key, and the output
    query, key, kept = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.float32)
    while True:
        item = claim(shared, 1)
        if item >= (seqs.starts.shape[0] - 1) * heads * blocks:
            return
        sequence, head, first = item // (heads * blocks), item // blocks % heads, item % blocks * COLUMNS
        count = min(COLUMNS, columns - first)
        _load_part(state, seqs.read[sequence], head, first, count, part)
        for row in range(seqs.starts[sequence], seqs.starts[sequence + 1]):
            _take(q, row, head // group, rule.normalize, rule.scale, rule.eps, query)
            _take(k, row, head // group, rule.normalize, _ONE, rule.eps, key)
            if decay.shape[2] == 1:
                kept[:] = exp(decay[row, head, 0])
            else:
                for i in range(dim):
                    kept[i] = exp(decay[row, head, i])
            _step(part, sums, query, key, kept, v, row, head, first, count, rate[row, head], rule.delta)
            for c in range(count):
                out[row, head, first + c] = sums[1, c] + skip[head] * v[row, head, first + c]
            if seqs.write[row] >= 0:
                _keep_part(part, state, seqs.write[row], head, first, count)


@compiled()
def _load_part(state: Any, slot: int, head: int, first: int, count: int, part: Any) -> None:
    for i in range(part.shape[0]):
        for c in range(count):
            part[i, c] = state[slot, head, i, first + c] if slot >= 0 else _ZERO


@compiled()
def _keep_part(part: Any, state: Any, slot: int, head: int, first: int, count: int) -> None:
    for i in range(part.shape[0]):
        for c in range(count):
            state[slot, head, i, first + c] = part[i, c]


@compiled(FAST)
def _take(x: Any, row: int, head: int, normalize: bool, scale: Any, eps: Any, into: Any) -> None:
    """Copy one head of a row, scaled, and to length one if asked.

    The sum is that of the copy: the order of a sum over `x` would depend on whether numba knows it to be contiguous.
    """
    for i in range(into.shape[0]):
        into[i] = x[row, head, i]
    if normalize:
        total = _ZERO
        for i in range(into.shape[0]):
            total += into[i] * into[i]
        scale = scale / np.sqrt(total + eps)
    for i in range(into.shape[0]):
        into[i] *= scale


@compiled({"contract"})
def _step(
    part: Any,
    sums: Any,
    query: Any,
    key: Any,
    kept: Any,
    v: Any,
    row: int,
    head: int,
    first: int,
    count: int,
    rate: Any,
    delta: bool,
) -> None:
    """Change COLUMNS columns of S by one token; sums[1] becomes the output."""
    for c in range(COLUMNS):
        sums[0, c] = _ZERO
        sums[1, c] = _ZERO
    if delta:
        for i in range(part.shape[0]):
            for c in range(COLUMNS):
                part[i, c] *= kept[i]
                sums[0, c] += key[i] * part[i, c]
    else:
        for i in range(part.shape[0]):
            for c in range(COLUMNS):
                part[i, c] *= kept[i]
    for c in range(count):
        sums[0, c] = rate * (v[row, head, first + c] - sums[0, c])
    for i in range(part.shape[0]):
        for c in range(COLUMNS):
            part[i, c] += key[i] * sums[0, c]
            sums[1, c] += query[i] * part[i, c]


def run_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, sequences: Sequences, *, silu: bool
) -> Tensor:
    """x [T, channels] float32 or bfloat16 -> [T, channels] float32; see `convolve`."""
    out = _empty(x.shape, sequences)
    rows = x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.float().numpy()
    filters = weight.numpy(), np.empty(0, dtype=np.float32) if bias is None else bias.numpy()
    the_team().run(convolve, rows, *filters, silu, state.numpy(), sequences, out.numpy())
    return out


def run_on_team(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    skip: Tensor,
    rule: Rule,
    state: Tensor,
    sequences: Sequences,
) -> Tensor:
    """All float32 -> [T, heads, d_v]; see `recur`."""
    out = _empty(v.shape, sequences)
    inputs = (tensor.numpy() for tensor in (q, k, v, decay, rate, skip))
    the_team().run(recur, *inputs, rule, state.numpy(), sequences, out.numpy())
    return out


def _empty(shape: torch.Size, sequences: Sequences) -> Tensor:
    """A tensor to be filled, with zeros in padding rows."""
    out = torch.empty(shape, dtype=torch.float32)
    out[int(sequences.starts[-1]) :] = 0.0
    return out
