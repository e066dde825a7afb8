"""Generation with a KV cache, and with the whole sequence recomputed for every token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from chairlift.attention.choose import choose_backend
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import plan_memory
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.runner.base import ModelRunner
from chairlift.runner.cpu import CPURunner
from chairlift.runner.kv_storage import allocate_storage
from chairlift_lab.common.random_model import random_llama

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class RecomputePoint:
    """The cost of generating `tokens` tokens."""

    tokens: int
    cached_seconds: float
    recompute_seconds: float
    cached_tokens: int  # computed by the model
    recompute_tokens: int


def compare_recompute(
    device: torch.device, dtype: torch.dtype, *, sizes: Sequence[int], note: Note = lambda text: None
) -> list[RecomputePoint]:
    """One long generation each way; a point is its time up to that many tokens."""
    if not sizes or min(sizes) < 1:
        raise InvalidParameter("cache_sizes", f"must be numbers of tokens of at least 1, got {list(sizes)}")
    longest = max(sizes)
    runner = _runner(device, dtype, longest)
    note(f"{longest} tokens with a KV cache")
    cached = list(accumulate(_seconds_per_step(runner, [(i, 1) for i in range(longest)])))
    note(f"{longest} tokens without a KV cache")
    anew = list(accumulate(_seconds_per_step(runner, [(0, i + 1) for i in range(longest)])))
    return [RecomputePoint(n, cached[n - 1], anew[n - 1], n, n * (n + 1) // 2) for n in sorted(sizes)]


def _runner(device: torch.device, dtype: torch.dtype, longest: int) -> ModelRunner:
    model = random_llama(device, dtype)
    layers = model.attention_layers
    memory = plan_memory(
        layers,
        weight_bytes=0,
        kv_memory=None,
        dtype=dtype,
        device=device,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_batch_requests=1,
    )
    attention = choose_backend("auto", layers, device, dtype)
    storage = allocate_storage(layers, memory.num_blocks, BLOCK_SIZE, dtype, device)
    runner = CPURunner(model, attention, storage)
    runner.warm_up()
    return runner


def _seconds_per_step(runner: ModelRunner, spans: Sequence[tuple[int, int]]) -> list[float]:
    """Each step computes (start, count) tokens of one sequence and samples a token, as generating does."""
    longest = max(start + count for start, count in spans)
    table = range(-(-longest // BLOCK_SIZE))
    request = Request("only", [0] * longest, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
    seconds = []
    for step, (start, count) in enumerate(spans):
        begun = time.perf_counter()
        runner.run(StepPlan(step, (Chunk(request, start, count, table, samples=True),)))
        seconds.append(time.perf_counter() - begun)
    runner.forget(request.id)
    return seconds
