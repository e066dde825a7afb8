"""Timelines and budgets: what is drawn against what the engine's events say."""

from __future__ import annotations

import pytest

from chairlift.core.events import RequestAdmitted, RequestFinished, StepDone
from chairlift_lab.explain.recording import Run, TopicEngines
from chairlift_lab.explain.topics.steps import BUDGET_REQUESTS, REQUESTS, SLOTS, WAYS, Batching, BatchingData, Budget


@pytest.fixture(scope="module")
def batching_data(engines: TopicEngines) -> BatchingData:
    return Batching().run(engines)


@pytest.fixture(scope="module")
def drawn(batching_data: BatchingData) -> dict[str, dict[str, int]]:
    return Batching().draw(batching_data).drawn


def idle_rows(run: Run) -> int:
    """From the events alone: after a request of a batch is done, it costs a row in every step until all are."""
    on_board: set[str] = set()
    done: set[str] = set()
    ended: set[str] = set()
    total = 0
    for event in run.events:
        match event:
            case RequestAdmitted():
                on_board.add(event.request_id)
            case RequestFinished():
                ended.add(event.request_id)
            case StepDone():
                total += len(done)
                done |= ended
                ended = set()
                if done == on_board:
                    done, on_board = set(), set()
            case _:
                pass
    return total


@pytest.mark.parametrize("policy", WAYS)
def test_the_slots_drawn_are_those_of_the_run(
    batching_data: BatchingData, drawn: dict[str, dict[str, int]], policy: str
) -> None:
    run, line = batching_data.runs[policy], batching_data.timelines[policy]
    slots, tokens = drawn[policy], drawn[f"{policy} tokens"]
    done = run.done()
    assert slots["decode"] == sum(step.decode_tokens for step in done)
    assert slots["prefill"] + slots["decode"] == sum(step.requests for step in done)
    assert tokens["useful"] == sum(step.decode_tokens + step.prefill_tokens for step in done)
    assert tokens["padding"] == sum(step.padding_tokens for step in done)
    assert slots.get("idle", 0) == (0 if policy == "continuous" else idle_rows(run))
    assert sum(slots.values()) == SLOTS * run.turns
    assert line.bubbles == slots.get("idle", 0) + slots.get("blocked", 0)


def test_all_policies_do_the_same_work_and_only_one_without_waste(batching_data: BatchingData) -> None:
    lines = batching_data.timelines
    asked = sum(prompt + new - 1 for prompt, new, _ in REQUESTS)
    assert {sum(line.useful) for line in lines.values()} == {asked}
    assert lines["continuous"].bubbles == sum(lines["continuous"].padding) == 0
    assert lines["continuous"].turns < min(lines["static"].turns, lines["dynamic"].turns)
    assert min(lines[name].bubbles for name in ("static", "dynamic")) > 0


def test_no_request_has_two_slots_or_runs_before_it_arrives(batching_data: BatchingData) -> None:
    for line in batching_data.timelines.values():
        places: dict[str, set[int]] = {}
        for cell in line.cells:
            if cell.request:
                places.setdefault(cell.request, set()).add(cell.slot)
                assert cell.turn >= batching_data.arrivals[cell.request]
        assert all(len(slots) == 1 for slots in places.values())
        assert set(places) == set(batching_data.arrivals)


def test_the_text_has_the_figures_of_the_run(batching_data: BatchingData) -> None:
    text = Batching().filled(batching_data)
    for line in batching_data.timelines.values():
        assert f"{line.bubbles} bubbles" in text
        assert str(line.turns) in text
    assert str(sum(step.padding_tokens for step in batching_data.runs["static"].done())) in text


def test_the_budget_drawn_is_that_of_every_step(engines: TopicEngines) -> None:
    data = Budget().run(engines)
    drawn = Budget().draw(data).drawn["steps"]
    done = data.run.done()
    assert drawn["decode"] == sum(step.decode_tokens for step in done)
    assert (
        drawn["prefill"] == sum(step.prefill_tokens for step in done) == sum(prompt for prompt, _, _ in BUDGET_REQUESTS)
    )
    assert sum(drawn.values()) == data.budget * len(done)
    full = sum(step.decode_tokens + step.prefill_tokens == data.budget for step in done)
    assert full == data.full_steps > 0
    for step in data.run.steps:  # decodes first
        kinds = [chunk.decode for chunk in step.chunks]
        assert kinds == sorted(kinds, reverse=True)
    for request in data.run.requests:
        assert sum(data.run.prompt_chunks(request.name)) == len(request.prompt)
    assert any(len(data.run.prompt_chunks(request.name)) > 1 for request in data.run.requests)
