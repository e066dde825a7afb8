"""Measures the host's share of a GPU decode step: `python -m tests.engine.host_speed [REQUESTS ...]`.

Kernels are not run. All requests decode; each figure is the 20th percentile of about 180 steps. The last
figure of a line is the time to submit all requests, of 562 tokens on average.
"""

from __future__ import annotations

import random
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from chairlift.attention.backends.base import AttentionBackend, BatchSpec
from chairlift.attention.storage import KVStorage
from chairlift.core.budgets.base import FixedBudget
from chairlift.core.events import StepDone
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.models.base import CausalLM
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import BatchShape, StepSizes
from chairlift.runner.gpu.step import ComputedStep
from chairlift.text.tokenizer import Tokenizer
from tests.text import backends

BLOCK_SIZE = 16
NEW_TOKENS = 200
VOCAB = 300


def without_kernels(runner: GPURunner) -> GPURunner:
    """Let a runner return a constant token without running kernels."""
    cast(Any, runner._forward).compute = constant_token
    return runner


def constant_token(shape: BatchShape, *, all_rows: bool = False) -> ComputedStep:
    return ComputedStep(torch.empty(0), torch.full((shape.samples,), 5, dtype=torch.int32), None)


def make_engine(requests: int) -> Engine:
    model: Any = SimpleNamespace(
        device=torch.device("cpu"), vocab_size=VOCAB, hidden_size=1, attention_layers=(), dtype=torch.float32
    )
    runner = GPURunner(
        cast(CausalLM, model),
        cast(
            AttentionBackend, SimpleNamespace(batch_spec=lambda layers, dtype: BatchSpec(16, 8192, lambda rows: False))
        ),
        cast(KVStorage, SimpleNamespace(block_size=BLOCK_SIZE, num_tables=1)),
        StepSizes(requests, tokens=8192, context=4096),
    )
    kv = KVCache(num_blocks=requests * 64, block_size=BLOCK_SIZE)
    scheduler = Scheduler(kv, FixedBudget.of(8192 + requests, 8192), ContinuousPolicy(), requests)
    tokenizer = Tokenizer(backends.byte_level())
    return Engine(scheduler, without_kernels(runner), tokenizer, vocab_size=VOCAB, max_model_len=4096, seed=1)


def submit(engine: Engine, requests: int, temperature: float) -> float:
    """Submit requests with random prompts; return the seconds it took."""
    draw = random.Random(0)
    prompts = [[draw.randrange(200) for _ in range(draw.randint(100, 1024))] for _ in range(requests)]
    params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=NEW_TOKENS)
    begun = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, params)
    return time.perf_counter() - begun


def measure(requests: int, temperature: float) -> str:
    engine = make_engine(requests)
    submitting = submit(engine, requests, temperature)
    parts: dict[str, list[float]] = {"step": [], "schedule": [], "launch": [], "apply": []}
    while engine.has_work:
        begun = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - begun
        for done in events:
            if isinstance(done, StepDone) and done.decode_tokens == requests == done.requests:
                found = seconds, done.schedule_seconds, done.timing.build, done.apply_seconds
                for name, value in zip(parts, found, strict=True):
                    parts[name].append(value)
    typical = {name: sorted(values)[len(values) // 5] for name, values in parts.items()}
    figures = ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in typical.items())
    per_request = 1e6 * typical["step"] / requests
    return (
        f"{requests:5} requests, temperature {temperature:g}: {figures}; {per_request:.1f} us per request; "
        f"all submitted in {1e3 * submitting:.1f} ms"
    )


def main() -> None:
    torch.set_num_threads(1)
    for requests in map(int, sys.argv[1:] or ("8", "32", "128", "256")):
        for temperature in (0.0, 1.0):
            print(measure(requests, temperature), flush=True)


if __name__ == "__main__":
    main()
