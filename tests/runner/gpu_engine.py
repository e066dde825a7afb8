"""Engines with a small random model, on the GPU runner and on the CPU runner as reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from chairlift.attention.backends.base import choose_backend
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.attention.placement import place_layers
from chairlift.core.budgets.base import FixedBudget
from chairlift.core.events import RequestPreempted, TokenProduced
from chairlift.core.kv.windowed_cache import FULL, make_cache
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.dummy import dummy_tensors
from chairlift.runner.base import ModelRunner
from chairlift.runner.cpu import CPURunner
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import StepSizes
from chairlift.runner.memory import allocate_states, allocate_storage
from chairlift.structured.output import StructuredOutput
from chairlift.text.tokenizer import Tokenizer
from tests.core.driving import with_states
from tests.kernels.tiny_config import CONFIG
from tests.text import backends

MAX_REQUESTS, BLOCK_SIZE, MAX_LEN = 4, 8, 96
WEIGHT_SCALE = 0.3  # with smaller weights, a model with tied embeddings repeats its last token


def random_model(
    device: torch.device,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    zeroed: str | None = None,
) -> CausalLM:
    """CONFIG with `changes`, and normally distributed weights that are the same on every device.

    Weights whose names contain `zeroed` are 0.
    """
    config = CONFIG | (changes or {})
    generator = torch.Generator().manual_seed(0)
    tensors = (
        (name, (torch.randn(tensor.shape, generator=generator) * _scale_of(name, zeroed)).to(device))
        for name, tensor in dummy_tensors(config, torch.device("cpu"))
    )
    return build_model(config, tensors, dtype=dtype, device=device)


def _scale_of(name: str, zeroed: str | None) -> float:
    return 0.0 if zeroed is not None and zeroed in name else WEIGHT_SCALE


def make_engine(
    model: CausalLM,
    *,
    gpu: bool,
    num_blocks: int = 64,
    prefill: int = 24,
    attention: PagedGPUAttention | None = None,
    structured: StructuredOutput | None = None,
    eos_ids: frozenset[int] = frozenset(),
    num_states: int = 20,
) -> Engine:
    placement = None if model.recurrent_layers else place_layers(model.attention_layers, MAX_LEN)
    layers, where = model.attention_layers, (num_blocks, BLOCK_SIZE, model.dtype, model.device)
    storage = allocate_storage(layers, *where, placement)
    states = allocate_states(model.recurrent_layers, num_states, model.device)
    hybrid = with_states(num_blocks, BLOCK_SIZE, num_slots=num_states)
    reaches = (FULL,) if placement is None else placement.reaches
    plain = make_cache(num_blocks, BLOCK_SIZE, reaches=reaches, step_tokens=2 * prefill)
    kv = plain if states is None else hybrid
    runner: ModelRunner
    if gpu:
        runner = GPURunner(
            model,
            attention or PagedGPUAttention(),
            storage,
            StepSizes(MAX_REQUESTS, tokens=32, context=MAX_LEN),
            structured=structured,
            states=states,
        )
        runner.warm_up()
    else:
        bursted = choose_backend("bursted", model.attention_layers, model.device, model.dtype)
        runner = CPURunner(model, bursted, storage, structured=structured, states=states)
    return Engine(
        Scheduler(kv, FixedBudget.of(32, prefill), ContinuousPolicy(), MAX_REQUESTS),
        runner,
        Tokenizer(backends.byte_level()),
        vocab_size=model.vocab_size,
        max_model_len=MAX_LEN,
        eos_ids=eos_ids,
        seed=1,
        structured=structured,
    )


def generate(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> tuple[dict[str, list[int]], int]:
    """The tokens of each request, and the number of preemptions."""
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


def random_prompts(count: int, length: int = 20) -> list[list[int]]:
    """Return prompts of different lengths; every second one has the same prefix."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(0, 300, (17,), generator=generator).tolist()
    return [
        (shared if index % 2 else [])
        + torch.randint(0, 300, (1 + index * length // count,), generator=generator).tolist()
        for index in range(count)
    ]
