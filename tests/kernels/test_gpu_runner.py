"""The GPU's runner, without graphs where there is no GPU: the same tokens as the plain runner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.attention.choose import choose_backend
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.events import RequestPreempted, TokenProduced
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.policies.continuous import ContinuousPolicy
from chairlift.core.sampling_params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.decoder import DecoderLayer
from chairlift.models.fused_gpu import FusedGPUDecoder
from chairlift.runner.base import ModelRunner
from chairlift.runner.cpu import CPURunner
from chairlift.runner.gpu import runner as gpu_runner
from chairlift.runner.gpu import shapes as gpu_shapes
from chairlift.runner.gpu.graphs import Graphs
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import BatchShape, Shapes
from chairlift.runner.kv_storage import allocate_storage
from chairlift.text.tokenizer import Tokenizer
from tests.kernels.tiny_config import CONFIG
from tests.text import backends

SEATS, BLOCK_SIZE, MAX_LEN = 4, 8, 96


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter runs one program after the other: do not give it hundreds that have nothing to do."""
    if device.type == "cpu":
        monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)


@pytest.fixture(scope="module")
def model(device: torch.device) -> CausalLM:
    from chairlift.models.dummy import dummy_tensors

    return build_model(CONFIG, dummy_tensors(CONFIG, device), dtype=torch.float32, device=device)


def make_engine(
    model: CausalLM, *, gpu: bool, num_blocks: int = 64, prefill: int = 24, attention: PagedGPUAttention | None = None
) -> Engine:
    storage = allocate_storage(model.attention_layers, num_blocks, BLOCK_SIZE, model.dtype, model.device)
    runner: ModelRunner
    if gpu:
        backend = attention or PagedGPUAttention()
        runner = GPURunner(
            model, backend, storage, max_batch_requests=SEATS, max_batch_tokens=32, max_model_len=MAX_LEN
        )
        runner.warm_up()
    else:
        bursted = choose_backend("bursted", model.attention_layers, model.device, model.dtype)
        runner = CPURunner(model, bursted, storage)
    scheduler = Scheduler(KVCache(num_blocks, BLOCK_SIZE), FixedBudget.of(32, prefill), ContinuousPolicy(), SEATS)
    tokenizer = Tokenizer(backends.byte_level())
    return Engine(scheduler, runner, tokenizer, vocab_size=model.vocab_size, max_model_len=MAX_LEN, seed=1)


def generate(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> tuple[dict[str, list[int]], int]:
    for index, (prompt, params) in enumerate(requests):
        engine.submit(prompt, params, request_id=f"r{index}")
    tokens: dict[str, list[int]] = {}
    preemptions = 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                tokens.setdefault(event.request_id, []).append(event.token)
            preemptions += isinstance(event, RequestPreempted)
    assert engine.fatal is None, engine.fatal
    return tokens, preemptions


def prompts(count: int, length: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(0, 300, (17,), generator=generator).tolist()
    return [
        (shared if index % 2 else [])
        + torch.randint(0, 300, (1 + index * length // count,), generator=generator).tolist()
        for index in range(count)
    ]


def test_greedy_tokens_are_the_plain_runners(model: CausalLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    requests = [(prompt, params) for prompt in prompts(4)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert generate(make_engine(model, gpu=True), requests)[0] == expected


def test_rows_that_only_make_a_long_step_a_with_decode_sizes_one_do_nothing(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three single tokens beside a prompt, in a step that is too long for a graph, get the kernels of four."""
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [2])
    monkeypatch.setattr(gpu_runner, "can_capture", lambda device: True)
    monkeypatch.setattr(Graphs, "find", lambda graphs, shape: None)
    familiar, more = Shapes._with_decode_sizes, []

    def spied(shapes: Shapes, exact: BatchShape) -> BatchShape:
        shape = familiar(shapes, exact)
        more.append((shape.singles - exact.singles, shape.samples - exact.samples))
        return shape

    monkeypatch.setattr(Shapes, "_with_decode_sizes", spied)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    requests = [([3 + i, 5, 9], params) for i in range(3)] + [(list(range(20, 65)), params)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert generate(make_engine(model, gpu=True), requests)[0] == expected
    assert (1, 1) in more


def test_invariant_attention_takes_its_memory_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one to four single tokens, with chunks and without, use slices of what was taken beforehand."""
    from chairlift.kernels.triton import invariant_attention as triton_invariant_attention

    attention = PagedGPUAttention(invariant_for=MAX_LEN)
    attention.reserve(model.attention_layers, SEATS, model.device)
    monkeypatch.delattr(triton_invariant_attention, "SpanScratch")  # no more of them
    outputs = [2, 3, 4, 5]
    requests = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False))
        for prompt, count in zip(prompts(4), outputs, strict=True)
    ]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert generate(make_engine(model, gpu=True, attention=attention), requests)[0] == expected


def test_preempted_requests_lose_no_token(model: CausalLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    requests = [(prompt, params) for prompt in prompts(4)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    found, preemptions = generate(make_engine(model, gpu=True, num_blocks=8), requests)
    assert preemptions > 0
    assert found == expected


def test_beams_are_the_plain_runners(model: CausalLM) -> None:
    search = SamplingParams(beam_width=3, n=3, max_tokens=4, detokenize=False)
    plain = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    requests = [([7, 8, 9], plain), ([5, 6, 7, 8, 9, 10], search)]
    expected, _ = generate(make_engine(model, gpu=False), requests)
    assert len(expected) == 4
    assert generate(make_engine(model, gpu=True), requests)[0] == expected


def test_every_kind_of_sampling_in_one_batch(model: CausalLM) -> None:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=3, detokenize=False),
        SamplingParams(temperature=1.0, seed=3, max_tokens=3, detokenize=False),
        SamplingParams(temperature=0.8, top_k=8, top_p=0.9, seed=4, max_tokens=3, detokenize=False),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=3, detokenize=False),
        SamplingParams(temperature=1.0, logit_bias={7: 100.0}, logprobs=2, seed=9, max_tokens=3, detokenize=False),
        SamplingParams(temperature=0.7, n=2, seed=5, max_tokens=3, detokenize=False),
    ]
    requests = list(zip(prompts(len(kinds)), kinds, strict=True))
    expected, _ = generate(make_engine(model, gpu=False), requests)
    found, _ = generate(make_engine(model, gpu=True), requests)
    assert found == expected
    assert set(found["r4"]) == {7}


def test_a_rehearsal_is_as_large_as_steps_get_and_leaves_nothing_behind(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_shapes, "MIXED_BUCKETS", [16])  # the interpreter is slow
    runner = make_engine(model, gpu=True).executor
    assert isinstance(runner, GPURunner)
    remembered = [*runner.storage.keys, *runner.storage.values, runner.tables, runner.last_token]
    before = [tensor.view(torch.uint8).clone() for tensor in remembered]
    logits: list[torch.Size] = []
    head = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda hidden: logits.append(hidden.shape) or head(hidden))
    runner.measure_largest_step()
    assert [shape[0] for shape in logits] == [SEATS]
    assert runner.largest_shape.tokens == 32 + SEATS
    assert all(tensor.view(torch.uint8).equal(old) for tensor, old in zip(remembered, before, strict=True))


def test_a_step_that_samples_nothing_ends_with_the_last_attention(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left for what follows, and kernels that copy tiles do not take a tensor without rows."""
    from chairlift.models.dummy import dummy_tensors

    shape = CONFIG | {"num_hidden_layers": 2}
    model = build_model(shape, dummy_tensors(shape, device), dtype=torch.float16, device=device)
    rest, rows = DecoderLayer.rest, list[int]()

    def spied(layer: DecoderLayer, x: Tensor, attended: Tensor, positions: Tensor) -> Tensor | None:
        rows.append(len(x))
        return rest(layer, x, attended, positions)

    monkeypatch.setattr(DecoderLayer, "rest", spied)
    monkeypatch.setattr(FusedGPUDecoder, "most_rows", 0)
    monkeypatch.setattr(gpu_runner, "can_capture", lambda device: False)  # those have room for a sample of every seat
    engine = make_engine(model, gpu=True, prefill=8)
    rows.clear()
    generate(engine, [(list(range(2, 22)), SamplingParams(temperature=0.0, max_tokens=1))])
    assert rows == [8, 8, 4, 1]
