"""Greedy tokens of an engine against transformers, in every way in which a request can be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from chairlift.config import EngineConfig
from chairlift.core.events import RequestPreempted, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, load_model, start_engine

COUNT = 12  # generated tokens
BLOCK_SIZE = 4
VARIATIONS: dict[str, dict[str, Any]] = {
    "alone": {"max_batch_requests": 1},
    "together": {"prefix_caching": False},
    "padded": {"attention": "padded"},
    "bursted": {"attention": "bursted"},
    "chunks of 1": {"max_prefill_tokens": 1},
    "chunks of 7": {"max_prefill_tokens": 7},
    "chunks of 64": {"max_prefill_tokens": 64},
    "ngram": {"speculate": "ngram"},
}


@torch.inference_mode()
def greedy(reference: Any, prompt: list[int], count: int = COUNT) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generate(
    loaded: LoadedModel, prompts: list[list[int]], *, blocks: int = 256, n: int = 1, rounds: int = 1, **options: Any
) -> tuple[list[list[int]], int]:
    """The tokens of every request of the last round, and how many were preempted."""
    model = loaded.model
    room = blocks * BLOCK_SIZE * bytes_per_token(model.attention_layers, model.dtype)
    base = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "kv_memory": room}
    engine = start_engine(loaded, EngineConfig(**(base | options))).engine
    preempted = 0
    for _ in range(rounds):
        params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, n=n)
        outputs: dict[str, list[int]] = {request: [] for prompt in prompts for request in engine.submit(prompt, params)}
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenProduced):
                    outputs[event.request_id].append(event.token)
                preempted += isinstance(event, RequestPreempted)
    return list(outputs.values()), preempted


def assert_greedy_everywhere(folder: Path, reference: Any, prompts: list[list[int]]) -> None:
    expected = [greedy(reference, prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 5, "a model that repeats a token shows no bug"
    loaded = _loaded(folder)
    for name, options in VARIATIONS.items():
        assert generate(loaded, prompts, **options)[0] == expected, name
    assert generate(loaded, prompts, rounds=2)[0] == expected, "warm prefix cache"
    longest = max(prompts, key=len)
    short = [longest[i : i + 1 + 11 * i % 37] for i in range(9)]
    found, preempted = generate(loaded, short, blocks=16, max_batch_requests=5)
    assert preempted
    assert found == [greedy(reference, prompt) for prompt in short], "preempted"
    triples = [tokens for tokens in expected for _ in range(3)]
    assert generate(loaded, prompts, n=3)[0] == triples, "n = 3"
    invariant = _loaded(folder, batch_invariant=True)
    assert generate(invariant, prompts, batch_invariant=True)[0] == expected, "batch-invariant"


def _loaded(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32", **options), progress=False)
