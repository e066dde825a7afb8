"""Every policy and every ordering on a real (tiny) model: schedules differ, tokens do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.core.events import Event, RequestPreempted, StepDone, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.errors import InvalidParameter
from tests.tiny import write_tiny_checkpoint

POLICIES = ("continuous", "static", "dynamic")
LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("strategies") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> LoadedModel:
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)


def generate(tiny: LoadedModel, **options: Any) -> tuple[list[list[int]], list[StepDone]]:
    """Prompts of uneven lengths and outputs, submitted while others run."""
    order = options.get("order", "fcfs")
    engine = start_engine(tiny, EngineConfig(device="cpu", dtype="float32", block_size=4, **options)).engine
    work = [([3 + (7 * i + j) % 300 for j in range(1 + 11 * i % 37)], 1 + 5 * i % 12) for i in range(12)]
    outputs: dict[str, list[int]] = {}
    steps = []

    def step() -> None:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
            elif isinstance(event, StepDone):
                steps.append(event)
        check_accounting(engine.scheduler)

    for index, (prompt, count) in enumerate(work):
        params = GREEDY.clone(max_tokens=count)
        priority = index % 3 if order == "priority" else 0
        (request_id,) = engine.submit(prompt, params, priority=priority, tenant="abc"[index % 3])
        outputs[request_id] = []
        step()
    engine.expect_no_more()
    while engine.has_work:
        step()
    assert engine.fatal is None
    check_quiescent(engine.scheduler)
    assert [len(tokens) for tokens in outputs.values()] == [count for _, count in work]
    return list(outputs.values()), steps


@pytest.fixture(scope="module")
def expected(tiny: LoadedModel) -> list[list[int]]:
    return generate(tiny, max_batch_requests=1, kv_memory="1MiB", attention="bursted")[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_batches_and_padded_attention_compute_padding(
    tiny: LoadedModel, expected: list[list[int]], policy: str
) -> None:
    """The tokens of all combinations are compared in `test_strategy_matrix.py`."""
    for attention in ("auto", "padded"):
        outputs, steps = generate(tiny, policy=policy, kv_memory="1MiB", max_batch_requests=4, attention=attention)
        assert outputs == expected
        padded = any(step.padding_tokens for step in steps)
        assert padded == (policy != "continuous" or attention == "padded")


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_modes_give_the_same_tokens(folder: Path, mode: str, caching: bool) -> None:
    """Prompts that fill 24 blocks of 4 and outputs that need twice as many."""
    prompts = [[3 + (17 * i + j) % 300 for j in range(9)] for i in range(6)]
    roomy = LLM(str(folder), kv_memory="1MiB", dtype="float32")
    expected = [r.outputs[0].token_ids for r in roomy.generate(prompts, LONG, use_tqdm=False)]
    options = {} if mode == "recompute" else {"swap_memory": "1MiB"}
    tight = LLM(
        str(folder),
        kv_memory=24 * 4 * 512,
        block_size=4,
        max_batch_requests=6,
        dtype="float32",
        prefix_caching=caching,
        preemption=mode,
        **options,
    )
    events: list[Event] = []
    tight.engine.subscribe(events.extend)
    for _ in range(2):  # the second time, auto has measured the cost of steps
        assert [r.outputs[0].token_ids for r in tight.generate(prompts, LONG, use_tqdm=False)] == expected
    swapped = [event.swapped for event in events if isinstance(event, RequestPreempted)]
    assert swapped
    if mode != "auto":
        assert set(swapped) == {mode == "swap"}
    check_quiescent(tight.engine.scheduler)


def test_a_list_of_prompts_does_not_wait_for_a_full_batch(folder: Path) -> None:
    """The batch may wait an hour, which the test's clock never reaches."""
    llm = LLM(str(folder), policy="static", max_delay_ms=3_600_000, max_batch_size=8, kv_memory="1MiB")
    results = llm.generate(["a chair", "a lift", "a batch"], GREEDY, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [8, 8, 8]
    assert len(list(llm.stream("a chair", GREEDY))) > 0


def test_a_batch_that_waits_reports_the_pause(folder: Path) -> None:
    llm = LLM(str(folder), policy="dynamic", max_delay_ms=50, max_batch_size=8, kv_memory="1MiB")
    engine = llm.engine
    assert engine.pause() == float("inf")
    (request_id,) = engine.submit([5, 6, 7], GREEDY)
    assert engine.pause() == 0.0  # an event is ready
    engine.step()
    assert 0.0 <= engine.pause() <= 0.05
    while engine.scheduler.get(request_id) is not None:
        engine.step()
    engine.step()
    assert engine.pause() == float("inf")


def test_prompts_carry_their_priority_and_tenant(folder: Path) -> None:
    llm = LLM(str(folder), order="priority", max_batch_size=1, kv_memory="1MiB")
    prompts = [{"prompt": "one", "priority": 2, "tenant": "x"}, {"prompt": "two", "priority": 1}, "three"]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    admitted = [result.metrics.boarded for result in results]
    assert sorted(admitted, reverse=True) == admitted  # the last one is admitted first
    with pytest.raises(InvalidParameter, match="tenant: must be a string"):
        llm.generate({"prompt": "x", "tenant": 3}, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="priority: must be an integer"):
        llm.generate({"prompt": "x", "priority": "high"}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"policy": "magic"}, "policy"),
        ({"order": "alphabetical"}, "order"),
        ({"max_delay_ms": 5}, "max_delay_ms"),
        ({"policy": "dynamic", "max_delay_ms": -1}, "max_delay_ms"),
        ({"policy": "dynamic", "max_delay_ms": "soon"}, "max_delay_ms"),
        ({"tenant_weights": {"a": 2}}, "tenant_weights"),
        ({"order": "fair", "tenant_weights": {"a": 0}}, "tenant_weights"),
        ({"order": "fair", "tenant_weights": ["a"]}, "tenant_weights"),
        ({"order": "fair", "tenant_weights": ["a=1", "a=2"]}, "tenant_weights"),
        ({"order": "fair", "tenant_weights": "a=1"}, "tenant_weights"),
        ({"order": "fair", "tenant_weights": 3}, "tenant_weights"),
        ({"max_overtakes": 0}, "max_overtakes"),
        ({"preemption": "nap"}, "preemption"),
        ({"swap_memory": "1GiB"}, "swap_memory"),
        ({"preemption": "swap", "swap_memory": "much"}, "swap_memory"),
    ],
)
def test_errors_name_the_invalid_option(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        EngineConfig(device="cpu", **options)
    assert refusal.value.parameter == parameter


def test_a_priority_without_effect_is_refused(tiny: LoadedModel) -> None:
    engine = start_engine(tiny, EngineConfig(device="cpu", kv_memory="1MiB")).engine
    with pytest.raises(InvalidParameter, match="priority: has no effect"):
        engine.submit([5, 6], GREEDY, priority=1)
