"""Every backend against a float64 reference, on random ragged batches of prefills, chunks and decodes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import choose_backend
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, visible_mask
from chairlift.attention.storage import KVStorage, narrowed, widened
from chairlift.errors import InvalidParameter

CPU = torch.device("cpu")


def reference(
    layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, start: int, sinks: Tensor | None = None
) -> Tensor:
    """Attention of one sequence, token by token and head by head, in float64."""
    out = torch.zeros(*q.shape[:2], layer.value_dim, dtype=torch.float64)
    group = layer.num_heads // layer.num_kv_heads
    for row in range(q.shape[0]):
        last = start + row
        first = 0 if layer.window is None else max(0, last - layer.window + 1)
        if layer.chunk is not None:
            first = max(first, last - last % layer.chunk)
        for head in range(layer.num_heads):
            seen = keys[first : last + 1, head // group].double()
            scores = seen @ q[row, head].double() * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            weights = scores.exp()
            total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
            out[row, head] = weights / total @ values[first : last + 1, head // group].double()
    return out


@st.composite
def ragged_cases(draw: st.DrawFn) -> tuple[AttentionLayer, list[tuple[int, int]], int, int]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_dim, values = draw(
        st.sampled_from([(8, None), (16, None), (40, 32), (64, None), (80, 64), (96, None), (128, None)])
    )
    layer = AttentionLayer(
        index=0,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7])),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([0.05, 0.125, 1.0])),
        window=draw(st.none() | st.integers(1, 30)),
        softcap=draw(st.sampled_from([None, 5.0, 50.0])),
        chunk=draw(st.none() | st.integers(1, 70)),
        sinks=draw(st.booleans()),
        latent_dim=values,
    )
    chunk = st.tuples(st.integers(0, 60) | st.integers(60, 300), st.sampled_from([1, 1, 1, 2, 7, 8, 9, 33]))
    return (
        layer,
        draw(st.lists(chunk, min_size=1, max_size=6)),
        draw(st.sampled_from([1, 4, 16, 32])),
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("name", BACKENDS.names())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=ragged_cases())
def test_backends_equal_the_reference(name: str, case: tuple[AttentionLayer, list[tuple[int, int]], int, int]) -> None:
    _compare_with_the_reference(name, case, torch.float32)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", BACKENDS.names())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(case=ragged_cases())
def test_backends_with_a_smaller_cache(
    name: str, kind: torch.dtype, case: tuple[AttentionLayer, list[tuple[int, int]], int, int]
) -> None:
    _compare_with_the_reference(name, case, kind)


def _compare_with_the_reference(
    name: str, case: tuple[AttentionLayer, list[tuple[int, int]], int, int], kind: torch.dtype
) -> None:
    layer, chunks, block_size, seed = case
    generator = torch.Generator().manual_seed(seed)
    try:
        backend = choose_backend(name, [layer], CPU, torch.float32)
    except InvalidParameter:
        assert not BACKENDS.get(name).__module__.startswith("chairlift."), "those of the package run every layer"
        reject()
    needed = [-(-(start + count) // block_size) for start, count in chunks]
    order = torch.randperm(sum(needed) + 3, generator=generator)
    shape = (sum(needed) + 4, block_size, layer.num_kv_heads, layer.head_dim)
    # Slots that no sequence owns contain NaN, so that reading one is detected.
    stored = narrowed(torch.full(shape, math.nan), kind)
    storage = KVStorage([stored], [stored if layer.latent_dim is not None else stored.clone()])
    tables = torch.zeros(len(chunks), max(needed), dtype=torch.int32)
    sequences, slots = [], []
    for i, (start, count) in enumerate(chunks):
        tables[i, : needed[i]] = order[sum(needed[:i]) : sum(needed[: i + 1])]
        keys, values = (
            widened(narrowed(torch.randn(start + count, *shape[2:], generator=generator), kind), torch.float32)
            for _ in range(2)
        )
        if layer.latent_dim is not None:
            values = keys[..., : layer.latent_dim]
        positions = torch.arange(start + count)
        slot = tables[i, positions // block_size].long() * block_size + positions % block_size
        storage.write(0, slot[:start], keys[:start], values[:start])
        sequences.append((keys, values))
        slots.append(slot[start:])
    starts, ends = [start for start, _ in chunks], [start + count for start, count in chunks]
    rows = batch_rows([count for _, count in chunks], backend.capabilities.rectangular)
    num_rows = rows[-1].stop
    q = torch.randn(num_rows, layer.num_heads, layer.head_dim, generator=generator)
    k, v = (torch.full((num_rows, layer.num_kv_heads, size), math.nan) for size in (layer.head_dim, layer.value_dim))
    where = torch.full((num_rows,), storage.scratch_block * block_size)
    for i, (keys, values) in enumerate(sequences):
        own = slice(rows[i].start, rows[i].start + chunks[i][1])
        k[own], v[own], where[own] = keys[starts[i] :], values[starts[i] :], slots[i]
    layout = RaggedLayout([0, *(row.stop for row in rows)], starts, ends, tables, where)
    sinks = 3 * torch.randn(layer.num_heads, generator=generator) if layer.sinks else None
    out = backend.begin(StepBatch(torch.zeros(num_rows), where, layout), storage).attend(layer, q, k, v, sinks=sinks)
    assert out.shape == (*q.shape[:2], layer.value_dim)
    assert out.isfinite().all()  # padding rows too, since the next layers compute them
    # The rounding error of a score grows with its size, and softmax passes it on.
    allowed = 2e-5 * max(1.0, layer.scale * layer.head_dim**0.5)
    if kind is torch.int8:
        allowed *= 10  # queries are rounded to 16 bits
    for i, (keys, values) in enumerate(sequences):
        own = slice(rows[i].start, rows[i].start + chunks[i][1])
        expected = reference(layer, q[own], keys, values, starts[i], sinks)
        torch.testing.assert_close(out[own].double(), expected, atol=allowed, rtol=1e-4)


def batch_rows(counts: list[int], rectangular: bool) -> list[slice]:
    """The rows of each sequence, padded to the longest one if the batch is a rectangle."""
    ends = list(accumulate([max(counts)] * len(counts) if rectangular else counts))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_the_mask_of_a_chunk() -> None:
    full = AttentionLayer(0, 2, 1, 8, 1.0)
    assert visible_mask(full, 2, 4, CPU).tolist() == [[True, True, True, False], [True, True, True, True]]
    window = replace(full, window=2)
    assert visible_mask(window, 2, 4, CPU).tolist() == [[False, True, True, False], [False, False, True, True]]
    chunk = replace(full, chunk=3)
    assert visible_mask(chunk, 2, 4, CPU).tolist() == [[True, True, True, False], [False, False, False, True]]


def test_block_copies_read_before_they_write() -> None:
    keys = torch.arange(4.0).reshape(4, 1, 1, 1)
    storage = KVStorage([keys], [keys.clone()])
    storage.copy_blocks([0, 1], [1, 2])
    assert keys.flatten().tolist() == [0, 0, 1, 3]


def test_unknown_and_unsuitable_backends_are_refused() -> None:
    layer = AttentionLayer(0, 2, 1, 8, 1.0)
    with pytest.raises(InvalidParameter, match="unknown backend"):
        choose_backend("unknown", [layer], CPU, torch.float32)
    with pytest.raises(InvalidParameter, match="takes float32"):
        choose_backend("ragged", [layer], CPU, torch.bfloat16)
    assert choose_backend("auto", [layer], CPU, torch.bfloat16).name == "bursted"


def test_the_kernel_compiles_where_no_cache_file_can_be_written() -> None:
    """A function without a file stands for a package folder that cannot be written to."""
    from chairlift.kernels.cpu.compiling import compiled_and_kept

    scope: dict[str, Any] = {}
    exec("def double(values):\n    for i in range(len(values)):\n        values[i] *= 2", scope)
    values = np.ones(3)
    compiled_and_kept()(scope["double"])(values)
    assert values.tolist() == [2, 2, 2]
