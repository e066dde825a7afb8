"""Checks that a request's tokens and logprobs do not depend on the rest of the batch."""

from __future__ import annotations

import torch

from chairlift.config import EngineConfig
from chairlift.core.events import RequestPreempted, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, start_engine

LENGTHS = (5, 40, 1, 17, 90, 33)
Scored = list[tuple[int, float]]  # tokens and their log-probabilities


def config(**options: object) -> EngineConfig:
    defaults: dict[str, object] = {"device": "cpu", "kv_memory": "4MiB", "prefix_caching": False, "block_size": 4}
    return EngineConfig(**(defaults | {"batch_invariant": True} | options))  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(engine: Engine, prompt_ids: list[list[int]]) -> tuple[list[Scored], int]:
    """The scored tokens of each prompt, greedy or sampled by its length, and the number of preemptions."""
    for index, prompt in enumerate(prompt_ids):
        params = SamplingParams(
            temperature=float(len(prompt) % 2), seed=3, max_tokens=10, ignore_eos=True, logprobs=0, detokenize=False
        )
        engine.submit(prompt, params, request_id=str(index))
    found: list[Scored] = [[] for _ in prompt_ids]
    preemptions = 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                assert event.logprobs is not None
                found[int(event.request_id)].append((event.token, event.logprobs.logprob))
            preemptions += isinstance(event, RequestPreempted)
    engine.check_alive()
    return found, preemptions


def check_all_batches(loaded: LoadedModel, **options: object) -> None:
    prompt_ids = prompts()
    alone = [generate(start_engine(loaded, config(**options)).engine, [prompt])[0][0] for prompt in prompt_ids]
    together, _ = generate(start_engine(loaded, config(**options)).engine, prompt_ids)
    assert together == alone
    chunked = start_engine(loaded, config(**options, max_batch_tokens=19, max_batch_requests=6)).engine
    assert generate(chunked, prompt_ids)[0] == alone
    memory = 2**14 * loaded.model.dtype.itemsize
    small_cache = start_engine(loaded, config(**options | {"kv_memory": memory}, max_batch_requests=8)).engine
    again, preemptions = generate(small_cache, prompt_ids)
    assert preemptions > 0, "no request was preempted"
    assert again == alone
