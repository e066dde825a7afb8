"""Policy x attention x budget x ordering x preemption x prefix caching: schedules differ, greedy tokens do not.

Any two values of different factors occur in a common row (`tests/pairwise.py`): 42 runs instead of 2,160. Memory is
short in all of them, so that requests are preempted, and requests arrive while others run.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.events import RequestPreempted, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from tests.pairwise import pairwise_rows
from tests.tiny import write_tiny_checkpoint

Options = dict[str, Any]

FACTORS: dict[str, tuple[Options, ...]] = {
    "policy": ({"policy": "continuous"}, {"policy": "static"}, {"policy": "dynamic", "max_delay_ms": 1.0}),
    "attention": ({"attention": "auto"}, {"attention": "padded"}, {"attention": "bursted"}),
    "budget": (
        {"max_batch_tokens": 24},
        {"max_batch_tokens": 32, "max_prefill_tokens": 5},
        {"budget": "knee"},
        {"target_tpot_ms": 3.0},
        {"target_tpot_ms": 5.0, "target_ttft_ms": 20.0},
    ),
    "order": (
        {"order": "fcfs"},
        {"order": "priority", "priority_takes_slots": True},
        {"order": "shortest", "learn_lengths": True},
        {"order": "boost"},
        {"order": "cached"},
        {"order": "fair"},
        {"order": "fair-cached"},
        {"order": "slack"},
    ),
    "preemption": (
        {"preemption": "recompute"},
        {"preemption": "swap", "swap_memory": "4MiB"},
        {"preemption": "auto", "swap_memory": "4MiB"},
    ),
    "caching": ({"prefix_caching": True}, {"prefix_caching": False}),
}
ROWS = pairwise_rows(FACTORS)
TARGETS = (NO_TARGETS, Targets(ttft=0.01, tpot=0.003), Targets(e2e=60.0))
BLOCK_SIZE, NUM_BLOCKS, MAX_BATCH_REQUESTS = 4, 20, 5
# (prompt tokens, output tokens) of the requests; the longest takes 12 of the 20 blocks
TINY_WORK = [(1 + 11 * i % 37, 1 + 5 * i % 12) for i in range(12)]
SMALL_WORK = [(3 + 5 * i % 17, 6 + 5 * i % 5) for i in range(6)]


def merged(row: dict[str, Options]) -> Options:
    return {name: value for options in row.values() for name, value in options.items()}


def name_of(row: dict[str, Options]) -> str:
    return "-".join(str(value) for options in row.values() for value in options.values())


def generate(loaded: LoadedModel, work: list[tuple[int, int]], options: Options) -> tuple[list[list[int]], int]:
    """The tokens of each request, and the number of preemptions."""
    model = loaded.model
    roomy = {"kv_memory": NUM_BLOCKS * BLOCK_SIZE * bytes_per_token(model.attention_layers, model.dtype)}
    config = EngineConfig(
        **(
            {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "max_batch_requests": MAX_BATCH_REQUESTS}
            | roomy
            | options
        )
    )
    engine = start_engine(loaded, config).engine
    outputs: dict[str, list[int]] = {}
    preemptions = 0

    def step() -> None:
        nonlocal preemptions
        for event in engine.step():
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
            preemptions += isinstance(event, RequestPreempted)
        check_accounting(engine.scheduler)

    for index, (prompt_len, count) in enumerate(work):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        priority = index % 3 if options.get("order") == "priority" else 0
        # Every third prompt shares a prefix with the one three before it.
        prompt = [3 + (7 * (index % 3) + j) % 290 for j in range(prompt_len)]
        targets = TARGETS[index % 3] if "slack" in options.values() else NO_TARGETS
        (request_id,) = engine.submit(prompt, params, priority=priority, tenant="abc"[index % 3], targets=targets)
        outputs[request_id] = []
        step()
    engine.expect_no_more()
    while engine.has_work:
        step()
    engine.check_alive()
    check_quiescent(engine.scheduler)
    assert [len(tokens) for tokens in outputs.values()] == [count for _, count in work]
    return list(outputs.values()), preemptions


ALONE: Options = {"max_batch_requests": 1, "attention": "bursted", "prefix_caching": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("matrix") / "tiny")
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)


@pytest.fixture(scope="module")
def expected_of_tiny(tiny: LoadedModel) -> list[list[int]]:
    return generate(tiny, TINY_WORK, ALONE)[0]


@pytest.fixture(scope="module")
def expected_of_default(default_model: LoadedModel) -> list[list[int]]:
    return generate(default_model, SMALL_WORK, ALONE)[0]


def test_every_pair_of_values_occurs_in_a_row() -> None:
    assert len(ROWS) <= 44
    for one, other in combinations(FACTORS, 2):
        met = {(name_of({one: row[one]}), name_of({other: row[other]})) for row in ROWS}
        assert len(met) == len(FACTORS[one]) * len(FACTORS[other])


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_all_strategies_give_the_same_tokens_on_a_tiny_model(
    tiny: LoadedModel, expected_of_tiny: list[list[int]], row: dict[str, Options]
) -> None:
    assert generate(tiny, TINY_WORK, merged(row))[0] == expected_of_tiny


def test_memory_is_short_enough_for_preemptions(tiny: LoadedModel) -> None:
    for preemption in FACTORS["preemption"]:
        assert generate(tiny, TINY_WORK, preemption)[1] > 0


def essential_rows() -> list[Any]:
    """The first few rows contain every value; the others are slow."""
    unseen = {name_of({factor: options}) for factor, values in FACTORS.items() for options in values}
    params = []
    for row in ROWS:
        values = {name_of({factor: options}) for factor, options in row.items()}
        new = len(values & unseen) >= 2 or (unseen and values & unseen and len(unseen) <= 3)
        params.append(pytest.param(row, marks=() if new else pytest.mark.slow, id=name_of(row)))
        unseen -= values if new else set()
    return params


@pytest.mark.model
@pytest.mark.parametrize("row", essential_rows())
def test_all_strategies_give_the_same_tokens_on_the_default_model(
    default_model: LoadedModel, expected_of_default: list[list[int]], row: dict[str, Options]
) -> None:
    assert generate(default_model, SMALL_WORK, merged(row))[0] == expected_of_default
