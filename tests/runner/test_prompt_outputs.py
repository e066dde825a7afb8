"""The GPU runner returns the same prompt outputs as the CPU runner, one step ahead of what is read."""

from __future__ import annotations

import pytest

from chairlift.core.events import PromptPooled, PromptScored, RequestPreempted
from chairlift.core.sampling.params import Pooling, PoolingKind, SamplingParams
from chairlift.engine.engine import Engine
from chairlift.models.base import CausalLM
from tests.runner.gpu_engine import make_engine

DECODE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
KINDS = [
    DECODE,
    SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, detokenize=False),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
    SamplingParams(max_tokens=0, pooling=Pooling()),
    SamplingParams(max_tokens=0, pooling=Pooling(PoolingKind.LAST, dimensions=8)),
    SamplingParams(max_tokens=0, pooling=Pooling.logits([3, 7])),
]
PROMPTS = [[(7 * index + 3 * place) % 300 for place in range(30)] for index in range(len(KINDS))]


def read(engine: Engine, *, preempting: bool = False) -> tuple[dict[str, list[float]], int]:
    """Every number of the prompt outputs by request, and the number of preemptions, of prompts with steps in flight."""
    for index, (prompt, params) in enumerate(zip(PROMPTS, KINDS, strict=True)):
        engine.submit(prompt, params, request_id=f"r{index}")
    found: dict[str, list[float]] = {}
    preemptions = steps = 0
    while engine.has_work:
        steps += 1
        if preempting and steps % 4 == 0 and steps < 20:
            for request in [one for one in engine.scheduler.running if one.steps_in_flight and not one.num_output]:
                engine.scheduler.state.preempt(request, 0.0)
        for event in engine.step():
            if isinstance(event, PromptScored):
                numbers = [number for one in event.logprobs for number in (one.token_id, one.logprob, one.rank)]
                found.setdefault(event.request_id, []).extend(numbers)
            if isinstance(event, PromptPooled):
                found[event.request_id] = list(event.vector)
            preemptions += isinstance(event, RequestPreempted)
    assert engine.fatal is None, engine.fatal
    return found, preemptions


@pytest.mark.parametrize("preempting", [False, True])
def test_prompt_outputs_equal_those_of_the_cpu_runner(model: CausalLM, preempting: bool) -> None:
    expected, _ = read(make_engine(model, gpu=False))
    found, preemptions = read(make_engine(model, gpu=True, prefill=12), preempting=preempting)
    assert {name: len(numbers) for name, numbers in expected.items()} == {
        "r1": 3 * 29,
        "r2": 3 * 29,
        "r3": model.hidden_size,
        "r4": 8,
        "r5": 2,
    }
    assert (preemptions > 2) == preempting
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, abs=1e-3), name
