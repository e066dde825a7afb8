"""A policy from outside the package works by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.policies.base import POLICIES
from chairlift.core.scheduler.waiting_queue import WaitReason
from tests.core.driving import make_request, make_scheduler, run_to_end, step
from tests.extending.pages import load_toy, page_shows, run_with_plugin

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_toy(monkeypatch, POLICIES, "pairs_policy.py")


def test_the_scheduler_runs_it(toy: ModuleType) -> None:
    assert isinstance(make_scheduler(policy="pairs").policy, toy.PairsPolicy)
    scheduler = make_scheduler(policy="pairs", max_batch_requests=8)
    for name in "abcde":
        scheduler.submit(make_request(name, 3), 0.0)
    step(scheduler)
    assert [request.id for request in scheduler.running] == ["a", "b"]
    assert scheduler.why_waiting("c") is WaitReason.BATCH_RUNNING
    assert max(len(plan.chunks) for plan in run_to_end(scheduler)) == 2


def test_the_offline_engine_runs_it_with_the_same_tokens(checkpoint: Path) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    usual = LLM(str(checkpoint), progress=False).generate(prompts, GREEDY, use_tqdm=False)
    llm = LLM(str(checkpoint), policy="pairs", progress=False)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in usual]


def test_a_plugin_file_is_found_by_name() -> None:
    program = "from chairlift.core.policies.base import make_policy; print(type(make_policy('pairs')).__name__)"
    assert run_with_plugin("pairs_policy.py", program) == "PairsPolicy\n"


def test_the_page_shows_the_toy() -> None:
    assert "pairs" in POLICIES.names()
    assert page_shows("policy.md", "pairs_policy.py")
