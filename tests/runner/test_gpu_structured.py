"""Structured output on the GPU runner, which works one step ahead, has the same tokens as on the CPU runner."""

from __future__ import annotations

import re

import pytest

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.engine.engine import Engine
from chairlift.models.base import CausalLM
from chairlift.structured.compiler import GrammarCompiler
from chairlift.structured.output import StructuredOutput, ThinkingBudgets
from chairlift.text.reasoning_formats.marked import ThinkFormat
from chairlift.text.tokenizer import Tokenizer
from tests.runner import gpu_engine
from tests.runner.gpu_engine import generate, random_prompts
from tests.text import backends

pytest.importorskip("llguidance")

END = frozenset({2})


def make_engine(model: CausalLM, *, gpu: bool) -> Engine:
    tokenizer = Tokenizer(backends.byte_level())
    compiler = GrammarCompiler(tokenizer, model.vocab_size, END)
    structured = StructuredOutput(compiler, model.vocab_size, ThinkingBudgets(ThinkFormat(""), tokenizer))
    return gpu_engine.make_engine(model, gpu=gpu, structured=structured, eos_ids=END)


def test_structured_and_plain_requests_share_steps_and_keep_their_tokens(model: CausalLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, structure=Structure.regex("[0-9]{3}-[ab]{2,9}")),
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, structure=Structure.choice(["red", "dark green"])),
        SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=5, max_tokens=12, structure=Structure.regex("[a-z]{1,11}"), min_tokens=3),
    ]
    requests = list(zip(random_prompts(len(params)), params, strict=True))
    on_gpu, on_cpu = make_engine(model, gpu=True), make_engine(model, gpu=False)
    tokens, _ = generate(on_gpu, requests)
    expected, _ = generate(on_cpu, requests)
    for name in ("r0", "r1", "r2", "r4"):  # r3 is drawn on the device, in another order of summation
        assert tokens[name] == expected[name]
    text = {name: on_gpu.tokenizer.decode(ids) for name, ids in tokens.items()}
    assert re.fullmatch("[0-9]{3}-[ab]{2,9}", text["r0"])
    assert text["r2"] in ("red", "dark green")
    assert re.fullmatch("[a-z]{1,11}", text["r4"])


def test_thinking_budgets_are_kept_to_the_token(model: CausalLM) -> None:
    on_gpu, on_cpu = make_engine(model, gpu=True), make_engine(model, gpu=False)
    opened, end = (on_gpu.tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    assert len(end) > 1
    shared = {"temperature": 0.0, "ignore_eos": True}
    params = [SamplingParams(max_tokens=14, thinking_token_budget=budget, **shared) for budget in (0, 1, 4)]
    requests = [(opened, one) for one in (*params, SamplingParams(max_tokens=14, **shared))]
    tokens, _ = generate(on_gpu, requests)
    expected, _ = generate(on_cpu, requests)
    assert tokens == expected
    for name, budget in (("r0", 0), ("r1", 1), ("r2", 4)):
        assert tokens[name][: budget + len(end)] == [*tokens["r3"][:budget], *end]
