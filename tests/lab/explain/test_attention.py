"""Masks and heads: what is drawn against the rule, and against the engine's own kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import RaggedLayout
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.core.cost_model import chunk_kv
from chairlift_lab.explain.recording import AttentionCall, TopicEngines, who_sees_whom
from chairlift_lab.explain.topics.attention import Attention
from chairlift_lab.explain.topics.masks import Masks, MasksData


@pytest.fixture(scope="module")
def masks_data(engines: TopicEngines) -> MasksData:
    return Masks().run(engines)


def test_the_masks_drawn_are_what_each_step_reads(masks_data: MasksData) -> None:
    data = masks_data
    drawn = Masks().draw(data).drawn
    (step,) = data.runs["causal"].steps
    tokens = step.chunks[0].count
    assert drawn["causal"] == {"new": chunk_kv(0, tokens), "masked": tokens * (tokens - 1) // 2}

    chunks = [chunk for step in data.runs["chunked"].steps for chunk in step.chunks]
    assert len(chunks) == len(data.chunked) > 2
    assert drawn["chunked"]["cached"] == sum(chunk.start * chunk.count for chunk in chunks)
    assert drawn["chunked"]["new"] == sum(chunk_kv(0, chunk.count) for chunk in chunks)
    whole = sum(chunk.count for chunk in chunks)
    assert drawn["chunked"]["cached"] + drawn["chunked"]["new"] == chunk_kv(0, whole), "the same triangle in the end"

    mixed = next(step for step in data.runs["ragged"].steps if Masks().mixed(step))
    assert drawn["ragged"]["cached"] == sum(chunk.start * chunk.count for chunk in mixed.chunks)
    assert drawn["ragged"]["new"] == sum(chunk_kv(0, chunk.count) for chunk in mixed.chunks)
    assert Masks().crossing(data.ragged) == 0
    assert "padding" not in drawn["ragged"]


def test_the_padding_drawn_is_what_the_engine_counted(masks_data: MasksData) -> None:
    data = masks_data
    drawn = Masks().draw(data).drawn["padded"]
    counts = [sequence.end for sequence in data.padded.sequences]
    done = next(done for done in data.runs["padded"].done() if done.requests == 3)
    assert done.padding_tokens == data.padded.padding_tokens == sum(max(counts) - count for count in counts)
    assert drawn["new"] == sum(chunk_kv(0, count) for count in counts)
    assert sum(drawn.values()) == len(counts) * max(counts) * data.padded_width
    beside = sum(count * (data.padded_width - count) for count in counts)
    assert drawn["padding"] == done.padding_tokens * data.padded_width + beside


def test_a_kernel_without_a_causal_mask_would_be_seen() -> None:
    """The masks are asked, not assumed: with an attention that sees everything, every pair is found."""
    layer = AttentionLayer(0, num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    q, k, v = (torch.randn(4, 1, 2) for _ in range(3))
    storage = KVStorage([torch.zeros(2, 4, 1, 2)], [torch.zeros(2, 4, 1, 2)])
    layout = RaggedLayout([0, 4], [0], [4], torch.zeros(1, 1, dtype=torch.int32), torch.arange(4))

    class SeesAll(StepAttention):
        def attend(
            self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
        ) -> Tensor:
            return v.mean(dim=0, keepdim=True).expand_as(q).clone()

    call = AttentionCall(layer, q, k, v, SeesAll().attend(layer, q, k, v), layout, storage, SeesAll())
    assert who_sees_whom(call) == [[True] * 4] * 4


def test_the_head_drawn_is_the_engine_s(engines: TopicEngines) -> None:
    data = Attention().run(engines)
    drawn = Attention().draw(data).drawn
    n, d = len(data.words), len(data.q[0])
    assert n == data.run.queued()[0].num_prompt
    assert drawn["scores"] == {"score": n * (n + 1) // 2, "masked": n * (n - 1) // 2}
    assert drawn["weights"] == {"weight": n * (n + 1) // 2}
    assert drawn["q"] == drawn["k"] == drawn["v"] == drawn["output"] == {"number": n * d}
    assert data.difference < 1e-4, "the formula and the kernel agree"
    for i, row in enumerate(data.weights):
        assert math.isclose(sum(row), 1.0, abs_tol=1e-3)
        assert not any(row[i + 1 :])
        for j in range(i + 1):
            score = sum(a * b for a, b in zip(data.q[i], data.k[j], strict=True)) * data.scale
            assert math.isclose(score, data.scores[i][j], abs_tol=1e-2)
    mixed = [sum(weight * value[0] for weight, value in zip(row, data.v, strict=True)) for row in data.weights]
    assert all(math.isclose(a, row[0], abs_tol=1e-2) for a, row in zip(mixed, data.output, strict=True))
