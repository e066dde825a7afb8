"""The GPU runner generates the same tokens as the CPU runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import Embeddings, StepBatch
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.graphs import Graphs
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.mlp import GatedMLP
from chairlift.models.base import CausalLM, HiddenStates
from chairlift.runner.gpu import runner as gpu_runner
from chairlift.runner.gpu import shapes as gpu_shapes
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import BatchShape, Shapes
from tests.runner.gpu_engine import MAX_LEN, MAX_REQUESTS, generate, make_engine, random_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)


def test_greedy_tokens_equal_those_of_the_cpu_runner(model: CausalLM) -> None:
    requests = [(prompt, GREEDY.clone(max_tokens=6)) for prompt in random_prompts(4)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert generate(make_engine(model, gpu=True), requests)[0] == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 10, "the tokens vary too little"


def test_the_tokens_depend_on_attention(device: torch.device) -> None:
    """Otherwise the tests of this module would pass with attention that returns zeros."""
    requests = [(prompt, GREEDY.clone(max_tokens=6)) for prompt in random_prompts(4)]
    expected, _ = generate(make_engine(random_model(device), gpu=False), requests)
    without_attention = random_model(device, zeroed="o_proj")
    changed, _ = generate(make_engine(without_attention, gpu=False), requests)
    assert all(changed[name] != expected[name] for name in expected)


def test_padding_rows_of_a_long_step_do_nothing(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three decodes beside a prompt, in a step that is too long for a graph, use the kernels for four."""
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [2])
    monkeypatch.setattr(gpu_runner, "can_capture", lambda device: True)
    monkeypatch.setattr(Graphs, "find", lambda graphs, shape: None)
    with_decode_sizes, added = Shapes._with_decode_sizes, []

    def recorded(shapes: Shapes, exact: BatchShape) -> BatchShape:
        shape = with_decode_sizes(shapes, exact)
        added.append((shape.singles - exact.singles, shape.samples - exact.samples))
        return shape

    monkeypatch.setattr(Shapes, "_with_decode_sizes", recorded)
    requests = [([3 + i, 5, 9], GREEDY) for i in range(3)] + [(list(range(20, 65)), GREEDY)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert generate(make_engine(model, gpu=True), requests)[0] == expected
    assert (1, 1) in added


def test_invariant_attention_allocates_its_memory_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one to four decodes, with and without chunks, use slices of the memory allocated at startup."""
    from chairlift.kernels.triton import invariant_attention as triton_invariant_attention

    attention = PagedGPUAttention(invariant_for=MAX_LEN)
    attention.reserve(model.attention_layers, MAX_REQUESTS, model.dtype, model.device)
    monkeypatch.setattr(
        triton_invariant_attention.SpanScratch, "__init__", lambda *given: pytest.fail("another one is allocated")
    )
    requests = [
        (prompt, GREEDY.clone(max_tokens=count)) for prompt, count in zip(random_prompts(4), (2, 3, 4, 5), strict=True)
    ]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert generate(make_engine(model, gpu=True, attention=attention), requests)[0] == expected


def test_preempted_requests_lose_no_token(model: CausalLM) -> None:
    requests = [(prompt, GREEDY.clone(max_tokens=12)) for prompt in random_prompts(4)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    found, preemptions = generate(make_engine(model, gpu=True, num_blocks=8), requests)
    assert preemptions > 0
    assert found == expected


def test_beams_equal_those_of_the_cpu_runner(model: CausalLM) -> None:
    search = SamplingParams(beam_width=3, n=3, max_tokens=4, detokenize=False)
    requests = [([7, 8, 9], GREEDY.clone(max_tokens=3)), ([5, 6, 7, 8, 9, 10], search)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert len(expected) == 4
    assert generate(make_engine(model, gpu=True), requests)[0] == expected


def test_one_batch_with_every_kind_of_sampling(model: CausalLM) -> None:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=3, detokenize=False),
        SamplingParams(temperature=1.0, seed=3, max_tokens=3, detokenize=False),
        SamplingParams(temperature=0.8, top_k=8, top_p=0.9, seed=4, max_tokens=3, detokenize=False),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=3, detokenize=False),
        SamplingParams(temperature=1.0, logit_bias={7: 100.0}, logprobs=2, seed=9, max_tokens=3, detokenize=False),
        SamplingParams(temperature=0.7, n=2, seed=5, max_tokens=3, detokenize=False),
    ]
    requests = list(zip(random_prompts(len(kinds)), kinds, strict=True))
    expected, _ = generate(make_engine(model, gpu=False), requests)
    found, _ = generate(make_engine(model, gpu=True), requests)
    assert found == expected
    assert set(found["r4"]) == {7}


def test_measuring_the_largest_step_changes_nothing(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [16])  # the interpreter is slow
    runner = make_engine(model, gpu=True).executor
    assert isinstance(runner, GPURunner)
    kept = [*runner.storage.keys, *runner.storage.values, runner.slots.tables, runner.slots.last_token]
    before = [tensor.view(torch.uint8).clone() for tensor in kept]
    logits: list[torch.Size] = []
    head = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda hidden: logits.append(hidden.shape) or head(hidden))
    runner.measure_largest_step()
    assert [shape[0] for shape in logits] == [MAX_REQUESTS]
    assert runner.largest_shape.tokens == 32 + MAX_REQUESTS
    assert all(tensor.view(torch.uint8).equal(old) for tensor, old in zip(kept, before, strict=True))


def test_a_step_that_samples_nothing_ends_with_the_last_attention(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rows remain after it, and kernels that copy tiles do not accept a tensor without rows."""
    monkeypatch.setattr(PlainWeight, "traits", replace(PlainWeight.traits, fuses={}))
    model = random_model(device, {"num_hidden_layers": 2}, dtype=torch.float16)
    inner, rows = GatedMLP.inner, list[int]()

    def recorded(mlp: GatedMLP, x: Tensor) -> Tensor:
        rows.append(len(x))
        return inner(mlp, x)

    monkeypatch.setattr(GatedMLP, "inner", recorded)
    monkeypatch.setattr(gpu_runner, "can_capture", lambda device: False)  # captured steps sample a row of each request
    engine = make_engine(model, gpu=True, prefill=8)
    rows.clear()
    generate(engine, [(list(range(2, 22)), SamplingParams(temperature=0.0, max_tokens=1))])
    assert rows == [8, 8, 4, 1]


def test_rows_given_as_vectors_replace_the_lookup_of_a_packed_step(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the parts of a prompt that are images will be."""
    runner = make_engine(model, gpu=True).executor
    logits, hidden_states, head = list[Tensor](), model.hidden_states, model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: logits.append(head(hidden)) or logits[-1])

    def compute(tokens: list[int], vectors: Embeddings | None) -> Tensor:
        def with_vectors(batch: StepBatch, *rest: Any) -> HiddenStates:
            return hidden_states(replace(batch, embeddings=vectors), *rest)

        monkeypatch.setattr(model, "hidden_states", with_vectors)
        request = Request(f"{len(logits)}", tokens, GREEDY, max_new_tokens=1, arrival=0.0)
        chunk = Chunk(request, start=0, count=len(tokens), table=[0, 1], samples=True)
        runner.run(StepPlan(step=0, chunks=(chunk,)))
        return logits[-1]

    tokens, rows = list(range(3, 12)), [1, 4]
    other = [0 if row in rows else token for row, token in enumerate(tokens)]
    expected = compute(tokens, None)
    vectors = model.embed(torch.tensor(tokens, device=model.device)[rows])
    given = Embeddings(torch.tensor(rows, device=model.device), vectors)
    torch.testing.assert_close(compute(other, given), expected)
    assert not torch.allclose(compute(other, None), expected)
