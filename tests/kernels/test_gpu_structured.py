"""Structured output on the GPU's runner, whose steps are queued one ahead: the same tokens as on the plain runner."""

from __future__ import annotations

import re

import pytest

from chairlift.attention.choose import choose_backend
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.policies.continuous import ContinuousPolicy
from chairlift.core.sampling_params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.structure import Structure
from chairlift.engine.engine import Engine
from chairlift.models.base import CausalLM
from chairlift.runner.base import ModelRunner
from chairlift.runner.cpu import CPURunner
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.kv_storage import allocate_storage
from chairlift.structured.compiler import GrammarCompiler
from chairlift.structured.output import StructuredOutput
from chairlift.text.tokenizer import Tokenizer
from tests.kernels.test_gpu_runner import BLOCK_SIZE, MAX_LEN, SEATS, few_splits, generate, model, prompts
from tests.text import backends

__all__ = ["few_splits", "model"]  # fixtures

pytest.importorskip("llguidance")

END = frozenset({2})


def make_engine(model: CausalLM, *, gpu: bool) -> Engine:
    tokenizer = Tokenizer(backends.byte_level())
    structured = StructuredOutput(GrammarCompiler(tokenizer, model.vocab_size, END), model.vocab_size)
    storage = allocate_storage(model.attention_layers, 64, BLOCK_SIZE, model.dtype, model.device)
    runner: ModelRunner
    if gpu:
        runner = GPURunner(
            model,
            PagedGPUAttention(),
            storage,
            max_batch_requests=SEATS,
            max_batch_tokens=32,
            max_model_len=MAX_LEN,
            structured=structured,
        )
    else:
        bursted = choose_backend("bursted", model.attention_layers, model.device, model.dtype)
        runner = CPURunner(model, bursted, storage, structured=structured)
    scheduler = Scheduler(KVCache(64, BLOCK_SIZE), FixedBudget.of(32, 24), ContinuousPolicy(), SEATS)
    return Engine(
        scheduler,
        runner,
        tokenizer,
        vocab_size=model.vocab_size,
        max_model_len=MAX_LEN,
        eos_ids=END,
        seed=1,
        structured=structured,
    )


def test_structured_and_plain_requests_share_steps_and_keep_their_tokens(model: CausalLM) -> None:
    shapes = [
        SamplingParams(temperature=0.0, max_tokens=12, structure=Structure.regex("[0-9]{3}-[ab]{2,9}")),
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, structure=Structure.choice(["red", "dark green"])),
        SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=5, max_tokens=12, structure=Structure.regex("[a-z]{1,11}"), min_tokens=3),
    ]
    requests = list(zip(prompts(len(shapes)), shapes, strict=True))
    ahead, plain = make_engine(model, gpu=True), make_engine(model, gpu=False)
    tokens, _ = generate(ahead, requests)
    expected, _ = generate(plain, requests)
    for name in ("r0", "r1", "r2", "r4"):  # r3 is drawn on the device, in another order of summation
        assert tokens[name] == expected[name]
    text = {name: ahead.tokenizer.decode(ids) for name, ids in tokens.items()}
    assert re.fullmatch("[0-9]{3}-[ab]{2,9}", text["r0"])
    assert text["r2"] in ("red", "dark green")
    assert re.fullmatch("[a-z]{1,11}", text["r4"])
