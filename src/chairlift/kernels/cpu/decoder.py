"""A whole decoder step as one kernel on a team of threads, from embedded tokens to normed hidden states.

A layer has ten phases; the threads share each phase and wait at a barrier after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.kernels.cpu.adapters import NO_TERMS, Groups, Terms, expand, shrink
from chairlift.kernels.cpu.aligned import aligned
from chairlift.kernels.cpu.attention import Cache, Score, attend, merge, store
from chairlift.kernels.cpu.attention_work import AttentionWork
from chairlift.kernels.cpu.compiling import FAST, compiled, compiled_and_kept
from chairlift.kernels.cpu.int8 import Rows
from chairlift.kernels.cpu.layer_math import Norms, gate_row, norm_row, stream_norm_row
from chairlift.kernels.cpu.threads import barrier, claim
from chairlift.kernels.cpu.weights import StepRows, StepWeight, TileWeight, layer_of, round_into, times


class Network(NamedTuple):
    """The weights of all L layers. An empty last axis means that the model has no such bias or norm."""

    before_attention: Norms
    qkv: StepWeight
    qkv_bias: np.ndarray  # [L, (heads + 2 * kv_heads) * head_dim]
    q_norm: np.ndarray  # [L, head_dim], or of all heads [L, heads * head_dim] with `norms_all_heads`
    k_norm: np.ndarray
    output: StepWeight
    output_bias: np.ndarray
    after_attention: Norms
    before_mlp: Norms
    gate_up: StepWeight
    gate_up_bias: np.ndarray
    down: StepWeight
    down_bias: np.ndarray
    after_mlp: Norms
    final_norm: np.ndarray  # [hidden]
    final_bias: np.ndarray
    centers: bool  # norms of the residual stream subtract the mean
    norms_all_heads: bool
    norms_after_rope: bool
    parallel: bool  # attention and feed-forward block read the same residual stream
    gated: bool
    eps: np.float32
    qk_eps: np.float32  # The norms of queries and keys use it.
    activation: int
    factors: np.ndarray  # [L, 4] float32 of the activation, if it has any
    ropes: np.ndarray  # [L] int64: index of the rotation of each layer, -1: none
    scales: np.ndarray  # [L] float32, of scores
    windows: np.ndarray  # [L] int64, 0: none
    softcaps: np.ndarray  # [L] float32, 0: none
    chunks: np.ndarray  # [L] int64, 0: none
    sinks: np.ndarray  # [L, heads] float32
    taps: np.ndarray  # [L] int64: index in `tapped` of the layer's input, -1: not kept


class Step(NamedTuple):
    """Inputs and outputs of one step of T tokens."""

    x: np.ndarray  # [T, hidden] float32: the residual stream, embedded tokens at first
    cos: np.ndarray  # [ropes, T, pairs] float32
    sin: np.ndarray
    slots: np.ndarray  # [G, T] int64, of G block tables
    keys: np.ndarray  # [planes, blocks, block_size, kv_heads, head_dim] float32, uint16 (bfloat16) or int8 with scales
    values: np.ndarray
    tables: np.ndarray  # [G, S, longest] int32
    places: np.ndarray  # [L, 2] int64: the plane and the table of each layer
    work: AttentionWork
    tapped: np.ndarray  # [taps, T, hidden] float32: the residual stream before some layers
    rows: np.ndarray  # [R] int64: rows whose final hidden states are needed, all different
    out: np.ndarray  # [R, hidden] float32: their normed hidden states; may be `x` itself if rows are all rows in order
    adapters: Terms = NO_TERMS


class Site(NamedTuple):
    """A product as adapters have it: its number, and where its shrunk inputs are kept."""

    product: int
    half: int


QKV, OUTPUT, GATE_UP, DOWN = range(4)
PRODUCTS = 4  # products of a layer, which adapters have by this number


class Buffers(NamedTuple):
    """Intermediate results between phases, for the largest number of rows of a step."""

    qkv: np.ndarray  # [rows, heads + 2 * kv_heads, head_dim] float32
    attended: np.ndarray  # [rows, heads, head_dim] float32
    gate_up: np.ndarray  # [rows, 2 * inner] float32, or [rows, inner] without a gate
    delta: np.ndarray  # [rows, hidden] float32: normed rows that adapters need, or what a block adds, before its norm
    hidden_rows: StepRows
    attended_rows: StepRows
    inner_rows: StepRows

    @classmethod
    def empty(
        cls,
        rows: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inner: int,
        gated: bool,
        kind: type[StepRows] = Rows,
    ) -> Buffers:
        return cls(
            aligned((rows, heads + 2 * kv_heads, head_dim), np.float32),
            aligned((rows, heads, head_dim), np.float32),
            aligned((rows, (2 if gated else 1) * inner), np.float32),
            aligned((rows, hidden), np.float32),
            kind.empty(rows, hidden),
            kind.empty(rows, heads * head_dim),
            kind.empty(rows, inner),
        )


@compiled_and_kept(FAST)
def decode_step(shared: Any, members: int, net: Network, step: Step, buffers: Buffers) -> None:
    last = net.scales.shape[0] - 1
    for layer in range(last + 1):
        if net.taps[layer] >= 0:
            _keep(shared, step.x, step.tapped[net.taps[layer]])
            barrier(shared, members)
        decode_layer(shared, members, net, layer, step, buffers, layer == last)
    while True:
        row = claim(shared, 1)
        if row >= step.out.shape[0]:
            break
        stream_norm_row(step.out[row], net.final_norm, net.final_bias, net.centers, net.eps, step.out[row])
    barrier(shared, members)


@compiled(FAST)
def decode_layer(
    shared: Any, members: int, net: Network, layer: int, step: Step, buffers: Buffers, picks: bool
) -> None:
    """Compute one layer. With `picks`, everything after attention is computed for the step's `rows` only, in `out`."""
    x = step.out if picks else step.x
    count = x.shape[0]
    heads = buffers.attended.shape[1]
    cache = _cache_of(step, layer)
    how = Score(net.scales[layer], net.windows[layer], net.softcaps[layer], net.chunks[layer], net.sinks[layer])

    store_layer(shared, members, net, layer, step, buffers)
    attend(shared, members, buffers.qkv[:, :heads], cache, step.work, how, buffers.attended)
    barrier(shared, members)
    _merge_and_round(shared, step, how.sinks, buffers, picks)
    barrier(shared, members)
    terms, groups = step.adapters, step.adapters.picked if picks else step.adapters.groups
    site = Site(layer * PRODUCTS + OUTPUT, 1)
    attended = buffers.attended.reshape(buffers.attended.shape[0], -1)
    shrink(shared, members, terms, groups, site.product, site.half, groups.rows, attended)
    before = Site(layer * PRODUCTS + GATE_UP, 0)
    if net.parallel:
        _norm_and_round(shared, members, x, net, net.before_mlp, layer, buffers, terms, groups, before)
    weight, rows, after = layer_of(net.output, layer), buffers.attended_rows, net.after_attention
    _add_product(shared, members, x, rows, weight, net.output_bias, net, after, layer, buffers, terms, groups, site)
    if not net.parallel:
        _norm_and_round(shared, members, x, net, net.before_mlp, layer, buffers, terms, groups, before)
    weight = layer_of(net.gate_up, layer)
    times(shared, members, buffers.hidden_rows, count, weight, net.gate_up_bias[layer], False, buffers.gate_up)
    barrier(shared, members)
    expand(shared, members, terms, groups, before.product, before.half, buffers.gate_up)
    _activate_and_round(shared, count, buffers, net, layer)
    barrier(shared, members)
    site = Site(layer * PRODUCTS + DOWN, 0)
    inner = buffers.gate_up.shape[1] // 2 if net.gated else buffers.gate_up.shape[1]
    shrink(shared, members, terms, groups, site.product, site.half, groups.places, buffers.gate_up[:, :inner])
    weight, rows = layer_of(net.down, layer), buffers.inner_rows
    _add_product(
        shared, members, x, rows, weight, net.down_bias, net, net.after_mlp, layer, buffers, terms, groups, site
    )


@compiled(FAST)
def _cache_of(step: Step, layer: int) -> Cache:
    plane, table = step.places[layer, 0], step.places[layer, 1]
    return Cache(step.keys[plane], step.values[plane], step.tables[table])


@compiled(FAST)
def _add_product(
    shared: Any,
    members: int,
    x: Any,
    rows: StepRows,
    weight: StepWeight,
    bias: Any,
    net: Network,
    norms: Norms,
    layer: int,
    buffers: Buffers,
    terms: Terms,
    groups: Groups,
    site: Site,
) -> None:
    """Add the product of `rows` to the residual stream, normed if there is a norm behind the block."""
    if norms.weight.shape[1] == 0:
        times(shared, members, rows, x.shape[0], weight, bias[layer], True, x)
        barrier(shared, members)
        expand(shared, members, terms, groups, site.product, site.half, x)
        return
    times(shared, members, rows, x.shape[0], weight, bias[layer], False, buffers.delta)
    barrier(shared, members)
    expand(shared, members, terms, groups, site.product, site.half, buffers.delta)
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            break
        delta, total = buffers.delta[row], x[row]
        stream_norm_row(delta, norms.weight[layer], norms.bias[layer], net.centers, net.eps, delta)
        for i in range(total.shape[0]):
            total[i] += delta[i]
    barrier(shared, members)


@compiled(FAST)
def store_layer(shared: Any, members: int, net: Network, layer: int, step: Step, buffers: Buffers) -> None:
    """Run the first three phases: project and rotate queries, keys and values; store keys and values."""
    flat = buffers.qkv.reshape(buffers.qkv.shape[0], -1)
    cache = _cache_of(step, layer)
    site, terms, groups = Site(layer * PRODUCTS + QKV, 0), step.adapters, step.adapters.groups
    _norm_and_round(shared, members, step.x, net, net.before_attention, layer, buffers, terms, groups, site)
    weight = layer_of(net.qkv, layer)
    times(shared, members, buffers.hidden_rows, step.x.shape[0], weight, net.qkv_bias[layer], False, flat)
    barrier(shared, members)
    expand(shared, members, terms, groups, site.product, site.half, flat)
    _rotate_and_store(shared, step, buffers.qkv, buffers.attended.shape[1], step.keys.shape[3], net, layer, cache)
    barrier(shared, members)


@compiled_and_kept(FAST)
def linear(shared: Any, members: int, x: Any, rows: StepRows, weight: TileWeight, bias: Any, out: Any) -> None:
    """Compute out [T, channels] = x [T, depth] times weight, plus bias."""
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            break
        round_into(x[row], rows, row)
    barrier(shared, members)
    times(shared, members, rows, x.shape[0], weight, bias, False, out)
    barrier(shared, members)


@compiled(FAST)
def _keep(shared: Any, x: Any, kept: Any) -> None:
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            return
        kept[row] = x[row]


@compiled(FAST)
def _norm_and_round(
    shared: Any,
    members: int,
    x: Any,
    net: Network,
    norms: Norms,
    layer: int,
    buffers: Buffers,
    terms: Terms,
    groups: Groups,
    site: Site,
) -> None:
    """Norm the residual stream and round it for a product, and shrink it for the terms of that."""
    own = np.empty(x.shape[1], dtype=np.float32)
    while True:
        row = claim(shared, 1)
        if row >= x.shape[0]:
            break
        normed = buffers.delta[row] if groups.slots.shape[0] > 0 else own
        if norms.weight.shape[1] == 0:
            normed[:] = x[row]
        else:
            stream_norm_row(x[row], norms.weight[layer], norms.bias[layer], net.centers, net.eps, normed)
        round_into(normed, buffers.hidden_rows, row)
    barrier(shared, members)
    shrink(shared, members, terms, groups, site.product, site.half, groups.places, buffers.delta)


@compiled(FAST)
def _rotate_and_store(
    shared: Any, step: Step, qkv: Any, heads: int, kv_heads: int, net: Network, layer: int, cache: Cache
) -> None:
    rope, table = net.ropes[layer], step.places[layer, 1]
    while True:
        row = claim(shared, 1)
        if row >= step.x.shape[0]:
            return
        if not net.norms_after_rope:
            _norm_heads(qkv[row], heads, kv_heads, net, layer)
        if rope >= 0:
            for head in range(heads + kv_heads):
                _rotate(qkv[row, head], step.cos[rope, row], step.sin[rope, row])
        if net.norms_after_rope:
            _norm_heads(qkv[row], heads, kv_heads, net, layer)
        store(cache, step.slots[table, row], qkv[row, heads : heads + kv_heads], qkv[row, heads + kv_heads :])


@compiled(FAST)
def _norm_heads(rows: Any, heads: int, kv_heads: int, net: Network, layer: int) -> None:
    """Norm queries and keys [heads + 2 * kv_heads, head_dim] of one token, per head or all heads together."""
    if net.q_norm.shape[1] == 0:
        return
    if net.norms_all_heads:
        flat, middle, end = rows.reshape(-1), heads * rows.shape[1], (heads + kv_heads) * rows.shape[1]
        norm_row(flat[:middle], net.q_norm[layer], net.qk_eps, flat[:middle])
        norm_row(flat[middle:end], net.k_norm[layer], net.qk_eps, flat[middle:end])
        return
    for head in range(heads + kv_heads):
        norm_row(rows[head], net.q_norm[layer] if head < heads else net.k_norm[layer], net.qk_eps, rows[head])


@compiled(FAST)
def _rotate(values: Any, cos: Any, sin: Any) -> None:
    """Rotate a head in place; element i of the first half is paired with element i of the second."""
    pairs = cos.shape[0]
    first, second = values[:pairs], values[pairs : 2 * pairs]  # loops from index zero are vectorised, others are not
    for i in range(pairs):
        x, y = first[i], second[i]
        first[i] = x * cos[i] - y * sin[i]
        second[i] = y * cos[i] + x * sin[i]


@compiled(FAST)
def _merge_and_round(shared: Any, step: Step, sinks: Any, buffers: Buffers, picks: bool) -> None:
    """Merge the pieces of attention rows and quantize them. With `picks`, only the picked rows, moved to the front
    together with their residuals."""
    flat = buffers.attended.reshape(buffers.attended.shape[0], -1)
    count = step.rows.shape[0] if picks else step.x.shape[0]
    merged = np.empty((1, buffers.attended.shape[2]), dtype=np.float32)
    while True:
        place = claim(shared, 1)
        if place >= count:
            return
        row = step.rows[place] if picks else place
        merge(row, step.work, sinks, merged, buffers.attended)
        round_into(flat[row], buffers.attended_rows, place)
        if picks:
            step.out[place] = step.x[row]


@compiled(FAST)
def _activate_and_round(shared: Any, count: int, buffers: Buffers, net: Network, layer: int) -> None:
    inner = buffers.gate_up.shape[1] // 2 if net.gated else buffers.gate_up.shape[1]
    while True:
        row = claim(shared, 1)
        if row >= count:
            return
        gate, up = buffers.gate_up[row, :inner], buffers.gate_up[row, inner:]
        gate_row(gate, up, net.activation, net.factors[layer])
        round_into(gate, buffers.inner_rows, row)


@compiled_and_kept(FAST)
def attend_layer(
    shared: Any,
    members: int,
    q: Any,
    k: Any,
    v: Any,
    slots: Any,
    cache: Cache,
    work: AttentionWork,
    how: Score,
    out: Any,
) -> None:
    """Store k [T, kv_heads, head_dim] and v [T, kv_heads, value_dim], and compute the attention of one layer:
    q [T, heads, head_dim] -> out [T, heads, value_dim]."""
    while True:
        row = claim(shared, 1)
        if row >= q.shape[0]:
            break
        store(cache, slots[row], k[row], v[row])
    barrier(shared, members)
    attend(shared, members, q, cache, work, how, out)
    barrier(shared, members)
    merged = np.empty((1, out.shape[2]), dtype=np.float32)
    while True:
        row = claim(shared, 1)
        if row >= q.shape[0]:
            break
        merge(row, work, how.sinks, merged, out)
    barrier(shared, members)
