"""An ordering from outside the package works by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.events import RequestPreempted
from chairlift.core.orderings.base import ORDERINGS
from tests.core.driving import events_of, make_request, make_scheduler, run_to_end
from tests.extending.pages import load_toy, page_shows, run_with_plugin

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_toy(monkeypatch, ORDERINGS, "newest_ordering.py")


def test_the_scheduler_runs_it(toy: ModuleType) -> None:
    scheduler = make_scheduler(order="newest", max_batch_requests=1)
    assert isinstance(scheduler.ordering, toy.NewestOrdering)
    for name in "abc":
        scheduler.submit(make_request(name, 3, new=1), 0.0)
    assert [plan.chunks[0].request.id for plan in run_to_end(scheduler)] == ["c", "b", "a"]


def test_it_decides_which_request_is_preempted() -> None:
    scheduler = make_scheduler(order="newest", num_blocks=6, block_size=2)
    for name in "ab":
        scheduler.submit(make_request(name, 3, new=8), 0.0)
    run_to_end(scheduler)
    preempted = {event.request_id for event in events_of(scheduler, RequestPreempted)}
    assert preempted == {"a"}


def test_the_offline_engine_runs_it_with_the_same_tokens(checkpoint: Path) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    usual = LLM(str(checkpoint), progress=False).generate(prompts, GREEDY, use_tqdm=False)
    llm = LLM(str(checkpoint), order="newest", max_batch_requests=1, progress=False)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in usual]


def test_a_plugin_file_is_found_by_name() -> None:
    program = "from chairlift.core.orderings.base import make_ordering; print(make_ordering('newest').name)"
    assert run_with_plugin("newest_ordering.py", program) == "newest\n"


def test_the_page_shows_the_toy() -> None:
    assert "newest" in ORDERINGS.names()
    assert page_shows("ordering.md", "newest_ordering.py")
