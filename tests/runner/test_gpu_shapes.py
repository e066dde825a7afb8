"""Every batch fits into its shape, and few shapes cover all recurring batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.paged.gpu import LONG_CONTEXT, PagedGPUAttention
from chairlift.runner.gpu.shapes import Shapes


def make_shapes(
    max_requests: int, splits_more: Callable[[int], bool], rows: int | None = None, tile_queries: int = 16
) -> Shapes:
    return Shapes(
        max_requests,
        rows or max_requests,
        tile_queries,
        graphs=True,
        long_context=LONG_CONTEXT,
        splits_more=splits_more,
    )


def test_every_batch_fits_its_shape_and_the_largest() -> None:
    shapes = make_shapes(20, lambda rows: False, rows=276, tile_queries=4)
    largest = shapes.largest(max_batch_tokens=3000)
    for singles in (0, 1, 9, 20, 100, 270):
        for long in ([], [2], [17, 30], [300] * 2, [3000]):
            if not singles + len(long):
                continue
            needs = {
                "tokens": singles + sum(long),
                "chunks": singles + len(long),
                "singles": singles,
                "tiles": sum(-(-count // 4) for count in long),
                "samples": singles + len(long),
                "updates": singles + sum(long),
            }
            shape, recurs = shapes.choose(**needs)
            assert all(getattr(shape, name) >= needs[name] for name in needs)
            assert all(getattr(shape, name) <= getattr(largest, name) for name in needs)
            assert shape.sections.size <= largest.sections.size
            assert shape.singles <= min(shape.chunks, shape.tokens)
            assert recurs or shape.tokens == needs["tokens"]
            assert recurs or {shape.singles, shape.samples} <= {0, *shapes.decode_buckets, shape.tokens}


def test_a_few_single_tokens_with_a_long_context_use_no_graph() -> None:
    shapes = make_shapes(128, lambda rows: rows > 2)
    needs = {"tokens": 600, "chunks": 120, "tiles": 40, "samples": 120, "updates": 9}
    for singles, longest, captured in ((2, LONG_CONTEXT, True), (2, LONG_CONTEXT + 1, False), (90, 10**5, True)):
        shape, recurs = shapes.choose(**needs, singles=singles, longest=longest)
        assert recurs == captured
        assert shape.singles == (128 if captured else singles)
        assert shape.long == (longest > LONG_CONTEXT and shape.singles > 2)
    alone = {"tokens": 30, "chunks": 30, "singles": 30, "tiles": 0, "samples": 30, "updates": 1}
    for longest in (LONG_CONTEXT, LONG_CONTEXT + 1):
        assert shapes.choose(**alone, longest=longest) == (shapes.decode(32, long=longest > LONG_CONTEXT), True)


def test_long_contexts_get_a_shape_of_their_own_only_where_they_are_split_further() -> None:
    shapes = make_shapes(48, lambda rows: rows == 32)
    decodes = shapes.decodes([1, 32, 48])
    assert [(shape.tokens, shape.long) for shape in decodes] == [(1, False), (32, False), (48, False), (32, True)]
    for tokens in (1, 30, 40):
        needs = {"tokens": tokens, "chunks": tokens, "singles": tokens, "tiles": 0, "samples": tokens, "updates": 1}
        short, long = (shapes.choose(**needs, longest=longest) for longest in (LONG_CONTEXT, LONG_CONTEXT + 1))
        assert (short == long) == (tokens != 30)
        assert {short[0], long[0]} <= {*decodes}


def test_steps_with_drafts_have_shapes_of_their_own() -> None:
    """Rows of one request read what others write, which takes another kernel; with prompts there is only that one."""
    shapes = make_shapes(20, lambda rows: False, rows=52)
    needs = {"tokens": 9, "chunks": 9, "singles": 9, "tiles": 0, "samples": 9, "updates": 1}
    found = [shapes.choose(**needs, drafts=drafts) for drafts in (False, True)]
    assert found == [(shapes.decode(16), True), (shapes.decode(16, drafts=True), True)]
    mixed = needs | {"tokens": 30, "tiles": 2}
    assert shapes.choose(**mixed, drafts=True) == shapes.choose(**mixed)
    kinds = [(shape.tokens, shape.drafts) for shape in shapes.decodes([1, 2, 32, 48])]
    assert kinds == [(1, False), (2, False), (32, False), (2, True), (32, True), (48, True)]
    assert not any(shape.drafts for shape in make_shapes(20, lambda rows: False).decodes([1, 2, 20]))


def test_kernels_of_steps_with_long_prompts_are_compiled_at_startup() -> None:
    shapes = make_shapes(256, lambda rows: rows == 32)
    prepared = [beside for shape in shapes.decodes(shapes.decode_buckets) for beside in shapes.beside_prompts(shape)]
    kinds = {(shape.singles, shape.long, shape.deep) for shape in prepared}
    for singles in (0, 1, 31, 32, 33, 208, 256):
        needs = {"singles": singles, "chunks": singles + 2, "samples": singles + 2, "tiles": 300, "updates": 9}
        for longest, deepest in ((0, 0), (LONG_CONTEXT + 1, 0), (0, LONG_CONTEXT + 1)):
            shape, captured = shapes.choose(tokens=4000, **needs, longest=longest, deepest=deepest)
            assert not captured
            assert not singles or (shape.singles, shape.long, False) in kinds
            assert not shape.deep or (0, False, True) in kinds
            assert shape.deep == (deepest > LONG_CONTEXT)
    assert len({*prepared}) == len({*shapes.decodes(shapes.decode_buckets)}) + 2  # and prompts after long contexts


def test_batch_sizes_at_which_a_long_context_is_split_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 512)  # as on a GPU
    full = AttentionLayer(0, 16, 8, 64, scale=1.0)
    window = AttentionLayer(0, 16, 8, 64, scale=1.0, window=1024)
    rows = [1, 8, 16, 32, 48, 64, 96, 128, 256]

    def splitting(backend: PagedGPUAttention, *layers: AttentionLayer) -> list[int]:
        spec = backend.batch_spec(layers, torch.bfloat16)
        return [size for size in rows if spec.splits_more(size)]

    assert splitting(PagedGPUAttention(), window, full) == [32, 48, 64]
    assert splitting(PagedGPUAttention(), window) == []
    assert splitting(PagedGPUAttention(invariant_for=4096), full) == []
