"""Drafts pause where steps with them take longer per token than steps without."""

from __future__ import annotations

import random

import pytest

from chairlift.speculation.control.payoff import DraftPayoff, DraftSlope, Pace, SpeculationTuning

TUNING = SpeculationTuning()


def step(payoff: DraftPayoff, size: int, with_drafts: float, accepted: int, without: float = 1.0) -> bool:
    """One step, which takes this long with drafts or without; returns whether it had drafts."""
    drafted = payoff.allows_drafts(size)
    seconds = with_drafts if drafted else without
    payoff.observe(
        size, drafted, accepted if drafted else 0, seconds, proposing=0.0, num_drafts=2 * size if drafted else 0
    )
    return drafted


def test_nothing_is_drafted_before_enough_steps_without_drafts_are_measured() -> None:
    payoff = DraftPayoff()
    history = [step(payoff, 4, 1.0, 4) for _ in range(TUNING.enough_steps + 3)]
    assert history == [False] * TUNING.enough_steps + [True] * 3


def test_one_step_without_drafts_is_measured_after_each_refresh() -> None:
    payoff = DraftPayoff()
    history = [step(payoff, 1, 1.0, 1) for _ in range(TUNING.enough_steps + 3 * (TUNING.refresh + 1))]
    assert history == [False] * TUNING.enough_steps + 3 * ([True] * TUNING.refresh + [False])


def test_drafts_that_lose_are_measured_again_and_then_pause_twice_as_long_each_time() -> None:
    payoff, enough = DraftPayoff(), TUNING.enough_steps
    history = [step(payoff, 16, 1.3, 1) for _ in range(6000)]
    runs: list[list[bool]] = []
    for drafted in history:
        if runs and runs[-1][0] == drafted:
            runs[-1].append(drafted)
        else:
            runs.append([drafted])
    lengths = [len(run) for run in runs]
    assert lengths[:4] == [enough, enough, enough, 1], "drafts are compared with new steps without drafts"
    pauses = [length for run, length in zip(runs[4:-1], lengths[4:-1], strict=True) if not run[0] and length > enough]
    assert pauses == [128, 256, 512, 1024, 2048][: len(pauses)]
    assert len(pauses) >= 4


def test_a_trial_ends_before_it_loses_more_than_it_may() -> None:
    """The next step would probably lose as much as the ones before."""
    ended = {}
    for seconds in (1.4, 1.7, 1.8, 2.0, 9.0):
        payoff = DraftPayoff()
        history = [step(payoff, 1, seconds, 0) for _ in range(30)]
        ended[seconds] = history.index(False, TUNING.enough_steps) - TUNING.enough_steps
    assert ended == {1.4: 3, 1.7: 2, 1.8: 1, 2.0: 1, 9.0: 1}


def test_preparing_drafts_ends_no_trial_but_lengthens_the_pause() -> None:
    pauses = {}
    for preparing in (1.0, 9.0):
        payoff = DraftPayoff()
        for _ in range(TUNING.enough_steps):
            step(payoff, 1, 1.0, 0)
        payoff.observe_preparation(1, 0, preparing)
        assert payoff.allows_drafts(1)
        assert not payoff.batch(1).drafted.count, "it is not compared"
        step(payoff, 1, 9.0, 0)
        assert not payoff.allows_drafts(1)
        pauses[preparing] = payoff.batch(1).pause
    assert pauses[9.0] > 1.9 * pauses[1.0]


@pytest.mark.parametrize(("begin", "per_token"), [(300, 0.01), (600, 0.002), (3000, 0.001)])
def test_drafts_return_although_a_draft_model_catches_up_after_each_pause(begin: int, per_token: float) -> None:
    """One long request whose drafts are right from some step on; catching up takes longer the longer the pause was."""
    payoff, behind, drafted = DraftPayoff(), 0, 0
    for at in range(30_000):
        if not payoff.allows_drafts(1):
            payoff.observe(1, False, 0, 1.0, proposing=0.0, num_drafts=0)
            behind += 1
        elif behind > 1:
            caught_up = min(behind, 256)
            payoff.observe_preparation(1, 0, 1.0 + caught_up * per_token)
            behind -= caught_up
        else:
            accepted = 2 if at >= begin else 0
            payoff.observe(1, True, accepted, 1.3, proposing=0.1, num_drafts=3)
            drafted += at >= begin
    assert drafted > 0.9 * (30_000 - begin)


def test_a_pause_ends_when_drafts_begin_to_pay() -> None:
    payoff = DraftPayoff()
    assert sum(step(payoff, 1, 9.0, 2) for _ in range(500)) < 60
    assert sum(step(payoff, 1, 1.1, 2) for _ in range(5000)) > 2000
    assert payoff.batch(1).next_pause == TUNING.first_pause


def test_a_pause_of_one_batch_size_does_not_affect_the_others() -> None:
    payoff = DraftPayoff()
    for _ in range(60):
        step(payoff, 8, 9.0, 0)
        step(payoff, 7, 1.0, 7)
    assert payoff.batch(8).pause
    assert not payoff.batch(7).pause


@pytest.mark.parametrize("seed", range(4))
def test_bad_luck_for_a_few_steps_is_no_reason_to_pause(seed: int) -> None:
    """Two draft tokens, each right in two cases of five, in a step that takes a sixth longer for them."""
    payoff, chance = DraftPayoff(), random.Random(seed)
    used = 0
    for _ in range(1000):
        accepted = next((place for place in range(2) if chance.random() > 0.42), 2)
        used += step(payoff, 1, 1.16, accepted)
    assert used > 500


def test_drafts_of_one_request_that_lose_a_little_are_tried_less_and_less() -> None:
    payoff, chance = DraftPayoff(), random.Random(0)
    used = sum(step(payoff, 1, 1.1 * chance.uniform(0.95, 1.05), 0, chance.uniform(0.95, 1.05)) for _ in range(20_000))
    assert used < 0.06 * 20_000


def test_a_machine_that_slows_down_is_no_reason_to_pause() -> None:
    """Steps without drafts are seldom measured while drafts pay, and so were measured on the faster machine."""
    payoff = DraftPayoff()
    paces = [1.0] * 180 + [1.4] * 220
    used = [step(payoff, 4, 1.5 * pace, 3, pace) for pace in paces]
    assert sum(used[180:]) > 190
    assert not payoff.batch(4).pause


def test_the_speedup_is_estimated_from_steps_of_both_kinds() -> None:
    payoff = DraftPayoff()
    for _ in range(400):
        step(payoff, 2, 1.5, 4)
    assert payoff.speedup == pytest.approx(2.0, rel=0.1), "three times the tokens in one and a half times the time"


def test_a_slope_is_the_cost_of_one_more_draft_token() -> None:
    slope, chance = DraftSlope(), random.Random(0)
    slope.add(3, 1.0, 0.05)
    assert slope.value is None
    for _ in range(100):
        drafts = chance.randint(1, 15)
        slope.add(drafts, 1.0 + 0.02 * drafts, 0.05)
    assert slope.value == pytest.approx(0.02, rel=0.01)


def test_a_pace_is_all_time_by_all_tokens() -> None:
    pace = Pace()
    for seconds, tokens in ((1.0, 1), (3.0, 5), (2.0, 2)):
        pace.add(seconds, tokens, gain=0.0)
    assert (pace.value, pace.count) == (pytest.approx(6 / 8), 3)


def test_drafts_lose_whose_few_long_steps_cost_more_than_they_gain() -> None:
    """Long steps with drafts are not interruptions: most of their draft tokens are verified in them."""
    payoff, rng = DraftPayoff(), random.Random(0)
    spent, tokens = 0.0, 0
    for _ in range(3000):
        seconds, accepted = (22.5, 5) if rng.random() < 0.2 else (8.1, 0)
        drafted = step(payoff, 4, seconds, accepted, without=8.1)
        spent += seconds if drafted else 8.1
        tokens += 4 + accepted * drafted
    assert spent / tokens < 1.02 * 8.1 / 4


def test_an_interrupted_step_without_drafts_hardly_counts() -> None:
    for interrupted in range(TUNING.enough_steps):
        payoff = DraftPayoff()
        for index in range(TUNING.enough_steps):
            step(payoff, 1, 1.3, 0, without=8.0 if index == interrupted else 1.0)
        assert sum(step(payoff, 1, 1.3, 0) for _ in range(100)) < 8
