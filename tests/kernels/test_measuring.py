"""Profiles and benches of the GPU path, in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from chairlift.attention.backends import base
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import MemoryPlan
from chairlift.engine.startup import StartedEngine
from chairlift.kernels.triton.attention import Chunks, queries_per_tile
from chairlift.models import build_model
from chairlift.models.decoder import Decoder
from chairlift.models.dummy import dummy_tensors
from chairlift.runner.gpu.runner import GPURunner
from chairlift_lab.bench import kernels as kernel_speed
from chairlift_lab.bench.long_context import LongContextSettings, measure_long_contexts
from chairlift_lab.common.floor import GEMM, Ceilings
from chairlift_lab.profile.gpu import FIRST_KERNEL, make_profile
from chairlift_lab.profile.step_profile import Batch
from tests.kernels.tiny_config import CONFIG
from tests.lab.bench.test_step_profile import number_of_weights, one_step
from tests.runner.gpu_engine import make_engine


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Launch few empty programs, since the interpreter runs them in sequence."""
    if device.type == "cpu":
        monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)


@pytest.fixture(scope="module")
def model(device: torch.device) -> Decoder:
    built = build_model(CONFIG, dummy_tensors(CONFIG, device), dtype=torch.float32, device=device)
    assert isinstance(built, Decoder)
    return built


def test_a_batch_on_the_pipelined_runner_is_profiled(model: Decoder) -> None:
    engine = make_engine(model, gpu=True, prefill=8)
    assert isinstance(engine.executor, GPURunner)
    started = StartedEngine(engine, engine.executor, MemoryPlan(0, 0, 8, 64, 96, "test"))
    batch = Batch(engine, 2, 7, random.Random(0))  # its prompts do not fit into one step
    batch.start()
    steps = list(batch.run(2))
    batch.end()
    assert not engine.has_work
    assert [step.done.decode_tokens for step in steps] == [2, 2]
    recorded = [event for number in range(7) for event in one_step(100 * number)]
    profile = make_profile(started, 2, steps, steps, recorded)
    assert profile.step_seconds == pytest.approx(100e-6)
    assert profile.share(GEMM) == pytest.approx(0.5)
    assert profile.parts[0].flops_per_second == pytest.approx(2 * 2 * number_of_weights() / 50e-6)
    assert profile.more["idle_share"] == pytest.approx(0.14)
    later = [replace(step, end=step.end + 1.0) for step in steps]  # as if the host slept for a second each time
    gap = make_profile(started, 2, later, steps, recorded).more["host_gap_share"]
    busy = sum(step.done.timing.forward for step in later)
    assert gap == pytest.approx(1 - busy / sum(step.seconds for step in later))


def test_a_long_prompt_alone_is_measured_on_the_pipelined_runner(model: Decoder) -> None:
    """Its first chunks sample nothing."""
    engine = make_engine(model, gpu=True, prefill=24)
    assert isinstance(engine.executor, GPURunner)
    started = StartedEngine(engine, engine.executor, MemoryPlan(0, 0, 8, 64, 96, "test"))
    settings = LongContextSettings(lengths=[20, 60], output_tokens=3)
    short, long = measure_long_contexts(started, Ceilings(1e9, 1e12), settings)
    assert (short["chunks"], long["chunks"]) == (1, 3)
    assert long["kv_bytes"] == 60 * 4 * 2 * 2 * 16
    assert long["attention_seconds"] is not None
    assert long["attention_floor_seconds"] == pytest.approx(
        (long["kv_bytes"] + 2 * 4 * 4 * 16) / 1e9
    )  # query and result too


def test_attention_and_sampling_run_as_they_do_in_a_step(
    model: Decoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "choose_backend", lambda *_: PagedGPUAttention())
    settings = kernel_speed.KernelSettings(batch=[2], contexts=[40])
    prompts: list[Chunks] = []
    monkeypatch.setattr(
        "chairlift.kernels.triton.attention.prefill_attention",
        lambda q, keys, values, out, chunks, *_, **__: prompts.append(chunks),
    )
    decode, prompt = kernel_speed._attention(model, torch.float32, settings, "auto")
    for case in (decode, prompt):
        case.run()
    assert (decode.calls, prompt.size) == (1, "40 tokens")
    # As in the runner: pairs of heads share their keys.
    queries = queries_per_tile(4, 2, 16, torch.float32)
    assert prompts[0].tile_queries == queries
    assert prompts[0].tile_offset.tolist() == list(range(0, 40, queries))
    logits = torch.randn(2, 50, device=model.device)
    kernel_speed._device_sampler(logits, SamplingParams(temperature=0.0))()


def test_a_profile_finds_the_first_kernel_of_a_step() -> None:
    from chairlift.kernels.triton.layers import begin_step_kernel

    assert begin_step_kernel.__name__ == FIRST_KERNEL
