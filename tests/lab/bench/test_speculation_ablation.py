"""`chairlift bench speculation --ablate`: replays are deterministic, and every tuned constant is ablated."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from chairlift.speculation.control.payoff import SpeculationTuning
from chairlift_lab.common.speculation_replay import (
    CHANGES,
    H200,
    RECORDED_HEAD,
    ReplayWorkload,
    ablate,
    earns_its_place,
    load_recording,
    replay,
)
from chairlift_lab.common.workload import SCENARIOS

SHORT = ReplayWorkload("short", (("quotes", 2, 4), ("chat", 1, 2)))


def test_the_recording_has_drafts_for_all_scenarios() -> None:
    recording = load_recording()
    assert recording.keys() == SCENARIOS.keys()
    for answers in recording.values():
        for one in answers:
            assert len(one.drafts) == len(one.levels) == len(one.output) - 1
            assert all(len(some) == len(levels) for some, levels in zip(one.drafts, one.levels, strict=True))


@pytest.mark.parametrize("proposer", [None, "ngram", RECORDED_HEAD])
def test_a_replay_always_takes_the_same_seconds(proposer: str | None) -> None:
    seconds = replay(SHORT, proposer, seed=1)
    assert seconds == replay(SHORT, proposer, seed=1)
    assert seconds != replay(SHORT, proposer, seed=2)


def test_drafts_save_time_in_a_replay() -> None:
    one = ReplayWorkload("one", (("quotes", 1, 6),))
    plain = replay(one, None)
    assert replay(one, "ngram") < 0.75 * plain
    assert replay(one, RECORDED_HEAD) < 0.85 * plain


def test_a_step_with_drafts_waits_for_the_host_where_steps_are_queued_ahead() -> None:
    waves = (("chat", 1, 2),)
    slow_host = replace(H200, host=10 * H200.step)
    fast, slow = (ReplayWorkload("one", waves, costs=costs) for costs in (H200, slow_host))
    always = SpeculationTuning(trial_chance=0.0, trial_loss=1e9, first_pause=0, longest_pause=0)
    assert replay(fast, RECORDED_HEAD) < 1.03 * replay(fast, None)
    assert replay(slow, RECORDED_HEAD, always) < replay(slow, None)  # fewer steps, each as long as the host takes


def test_every_constant_is_ablated() -> None:
    ablated = {name for changed in CHANGES.values() for name in changed}
    assert ablated == {field.name for field in fields(SpeculationTuning)}


def test_an_ablation_compares_every_workload_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "chairlift_lab.common.speculation_replay"
    monkeypatch.setattr(f"{module}.WORKLOADS", (SHORT,))
    monkeypatch.setattr(f"{module}.CHANGES", {"nothing": {}, "drafts": {"first_pause": 10**6, "trial_chance": 1.0}})
    nothing, drafts = ablate()
    assert (nothing["ratio"], nothing["worst_ratio"], earns_its_place(nothing)) == (1.0, 1.0, False)
    assert drafts["ratio"] > 1.05
    assert drafts["ratios"].keys() == {"short, ngram", f"short, {RECORDED_HEAD}"}
    assert drafts["worst_ratio"] == max(drafts["ratios"].values())
