"""A budget from outside the package works by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.budgets.base import BUDGETS, make_budget
from chairlift.core.cost_model import CostModel
from tests.core.driving import make_request, make_scheduler, shape, step
from tests.extending.pages import load_toy, page_shows, run_with_plugin

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_toy(monkeypatch, BUDGETS, "ramp_budget.py")


def test_the_scheduler_runs_it(toy: ModuleType) -> None:
    scheduler = make_scheduler(max_batch_tokens=16)
    scheduler.budget = make_budget("ramp", CostModel(), max_batch_tokens=16)
    assert isinstance(scheduler.budget, toy.RampBudget)
    scheduler.submit(make_request("a", 20), 0.0)
    assert [shape(step(scheduler)) for _ in range(4)] == [[("a", 0, 2)], [("a", 2, 4)], [("a", 6, 8)], [("a", 14, 6)]]


def test_the_offline_engine_runs_it_with_the_same_tokens(checkpoint: Path, toy: ModuleType) -> None:
    prompts = [list(range(5, 25)), [8, 9], [10, 11, 12, 13]]
    usual = LLM(str(checkpoint), progress=False).generate(prompts, GREEDY, use_tqdm=False)
    llm = LLM(str(checkpoint), budget="ramp", progress=False)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in usual]
    assert isinstance(llm.engine.scheduler.budget, toy.RampBudget)


def test_a_plugin_file_is_found_by_name() -> None:
    program = "from chairlift.core.budgets.base import BUDGETS; print(BUDGETS.get('ramp').__name__)"
    assert run_with_plugin("ramp_budget.py", program) == "RampBudget\n"


def test_the_page_shows_the_toy() -> None:
    assert "ramp" in BUDGETS.names()
    assert page_shows("budget.md", "ramp_budget.py")
