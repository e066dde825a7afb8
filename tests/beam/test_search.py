"""Beam search with given candidates: continuations, endings and the end of the search."""

from __future__ import annotations

import pytest

from chairlift.core.beam import BeamSearch, beam_group
from chairlift.core.events import RequestAdmitted
from chairlift.core.plan import Candidates
from chairlift.core.request import Ending, FinishReason
from chairlift.core.sampling.params import SamplingParams
from tests.beam.fake_model import run_plan, submit_beams
from tests.core.driving import events_of, make_scheduler

EOS = 9


def search_of(width: int = 2, max_new_tokens: int = 5, **params: object) -> BeamSearch:
    made = SamplingParams(beam_width=width, n=1, max_tokens=max_new_tokens, **params)  # type: ignore[arg-type]
    return BeamSearch(made, frozenset({EOS}), max_new_tokens)


def candidates(**logprobs: float) -> Candidates:
    """candidates(t3=-0.5, t4=-1.0): token 3 with log-probability -0.5, then token 4."""
    return Candidates([int(name[1:]) for name in logprobs], list(logprobs.values()))


def texts(search: BeamSearch) -> list[list[int]]:
    return [[step.token for step in beam.path()] for beam in search.beams]


def test_the_best_continuations_of_all_beams_continue_best_first() -> None:
    search = search_of()
    assert search.advance([candidates(t1=-0.1, t2=-0.5, t3=-3.0, t4=-4.0)]) == [0, 0]
    assert texts(search) == [[1], [2]]
    parents = search.advance(
        [candidates(t5=-2.0, t6=-2.5, t7=-9.0, t8=-9.0), candidates(t5=-0.2, t6=-9.0, t7=-9.0, t8=-9.0)]
    )
    assert parents == [1, 0]
    assert texts(search) == [[2, 5], [1, 5]]
    assert [beam.total for beam in search.beams] == pytest.approx([-0.7, -2.1])
    assert not search.over


def test_an_ending_is_kept_only_among_the_best() -> None:
    first = search_of()
    first.advance([candidates(t1=-0.5, t2=-0.55, t9=-0.6, t3=-0.7)])
    assert first.finished == []
    assert texts(first) == [[1], [2]]
    second = search_of()
    second.advance([candidates(t1=-0.5, t9=-0.6, t2=-0.7, t3=-0.8)])
    assert [(found.beam.token, found.ending) for found in second.finished] == [(EOS, Ending(FinishReason.STOP))]
    assert texts(second) == [[1], [2]]


def test_the_last_token_allowed_ends_every_beam_with_length() -> None:
    search = search_of(max_new_tokens=1)
    assert search.advance([candidates(t1=-0.1, t2=-0.5, t3=-3.0, t4=-4.0)]) == []
    assert search.over
    assert [(found.beam.token, found.ending.reason) for found in search.finished] == [
        (1, FinishReason.LENGTH),
        (2, FinishReason.LENGTH),
    ]


def test_stop_tokens_are_not_considered_before_min_tokens() -> None:
    search = search_of(min_tokens=1)
    assert search.num_candidates == 2 * 2 + 1
    search.advance([candidates(t9=-0.1, t1=-1.0, t2=-1.5, t3=-2.0, t4=-3.0)])
    assert search.finished == []
    assert texts(search) == [[1], [2]]
    assert search.num_candidates == 2 * 2


def test_an_ending_contains_the_stop_token_of_the_request() -> None:
    search = search_of(stop_token_ids=[7])
    assert search.num_candidates == 3 * 2  # two of three may end
    search.advance([candidates(t7=-0.1, t9=-0.2, t1=-1.0, t2=-2.0, t3=-3.0, t4=-4.0)])
    assert [found.ending for found in search.finished] == [
        Ending(FinishReason.STOP, 7),
        Ending(FinishReason.STOP),
    ]


def test_scores_are_divided_by_the_length_to_the_power_of_the_penalty() -> None:
    search = search_of(max_new_tokens=2, length_penalty=2.0)
    search.advance([candidates(t1=-1.0, t2=-2.0, t5=-8.0, t6=-9.0)])
    search.advance([candidates(t3=-3.0, t4=-9.0, t5=-9.5, t6=-9.9), candidates(t3=-4.0, t4=-9.0, t5=-9.5, t6=-9.9)])
    assert [found.score for found in search.finished] == [-4.0 / 2**2, -6.0 / 2**2]


@pytest.mark.parametrize(
    ("early_stopping", "continuation", "over"),
    [
        (True, -3.0, True),  # as many hypotheses as beams are enough
        (False, -3.0, True),  # (-1 - 3) / 2 is worse than the worst hypothesis, -3.1 / 2
        ("never", -3.0, False),  # in five tokens it could reach -4 / 5
        ("never", -7.5, True),  # -8.5 / 5 is still worse
    ],
)
def test_early_stopping_decides_when_the_search_is_over(
    early_stopping: bool | str, continuation: float, over: bool
) -> None:
    search = search_of(early_stopping=early_stopping)
    search.advance([candidates(t1=-1.0, t2=-1.1, t5=-8.0, t6=-9.0)])
    search.advance(
        [candidates(t9=-2.0, t1=continuation, t5=-20.0, t6=-21.0), candidates(t9=-2.0, t2=-19.0, t5=-20.0, t6=-21.0)]
    )
    assert [found.score for found in search.finished] == pytest.approx([-3.0 / 2, -3.1 / 2])
    assert search.over is over


def test_with_a_negative_penalty_never_compares_at_the_present_length() -> None:
    """A longer text would only lose by such a penalty: the most that a beam can reach is its score as it is."""
    search = search_of(early_stopping="never", length_penalty=-1.0)
    search.advance([candidates(t1=-1.0, t9=-1.1, t2=-1.5, t3=-9.0)])
    search.advance(
        [candidates(t3=-0.1, t9=-1.0, t4=-9.0, t5=-9.5), candidates(t3=-8.0, t4=-9.0, t5=-9.5, t6=-9.9)],
    )
    assert [found.score for found in search.finished] == pytest.approx([-1.1, -2.0 * 2])
    assert not search.over  # -1.1 * 2 is better than -4.0, though -1.1 * 5 would not be


def test_a_beam_that_can_only_tie_with_the_worst_hypothesis_does_not_continue() -> None:
    search = search_of()
    search.advance([candidates(t1=-1.0, t9=-1.5, t2=-2.0, t3=-9.0)])
    search.advance(
        [candidates(t9=-0.5, t3=-2.0, t4=-9.0, t5=-9.5), candidates(t3=-8.0, t4=-9.0, t5=-9.5, t6=-9.9)],
    )
    assert [found.score for found in search.finished] == [-1.5 / 2, -1.5]
    assert search.beams[0].total / 2 == -1.5
    assert search.over


def test_without_early_stopping_a_better_beam_continues() -> None:
    search = search_of(width=2, max_new_tokens=5, early_stopping=False)
    search.advance([candidates(t1=-1.0, t2=-1.1, t3=-5.0, t4=-6.0)])
    search.advance([candidates(t9=-2.0, t1=-0.1, t3=-7.0, t4=-8.0), candidates(t2=-0.1, t9=-3.0, t3=-7.0, t4=-8.0)])
    assert search.finished == []  # both endings are worse than two continuations
    assert texts(search) == [[1, 1], [2, 2]]


def test_a_rank_counts_the_candidates_that_are_strictly_likelier() -> None:
    search = search_of(logprobs=2)
    search.advance([candidates(t1=-0.5, t2=-0.5, t3=-0.5, t4=-2.0)])
    scored = [beam.scored for beam in search.beams]
    assert [one and one.rank for one in scored] == [1, 1]
    assert all(one is not None and len(one.top) == 2 for one in scored)


def test_a_group_needs_blocks_for_all_beams_until_they_have_joined() -> None:
    scheduler = make_scheduler(num_blocks=100, block_size=4, max_batch_requests=8)
    members = submit_beams(scheduler, "search", range(6), 3)
    group = beam_group(members[0])
    assert [member.num_slots for member in members] == [3, 1, 1]
    assert group.blocks_to_join(4) == 2 * (2 - 1)  # the prompt fills one block, which is shared, and half of another
    scheduler.apply(run_plan(scheduler.schedule(0.0)), 0.0)
    assert [member.num_slots for member in members] == [1, 1, 1]
    assert group.blocks_to_join(4) == 0
    admitted = [event.request_id for event in events_of(scheduler, RequestAdmitted)]  # type: ignore[union-attr]
    assert sorted(admitted) == sorted(member.id for member in members)
    scheduler.state.preempt(members[1], 1.0)
    assert [member.num_slots for member in members] == [3, 1, 1]
    assert list(scheduler.waiting) == [members[0]]
    assert not scheduler.running
    assert group.blocks_to_join(4) == 2 * (2 - 1)


def test_beams_share_no_more_than_the_prompt_until_they_have_joined() -> None:
    scheduler = make_scheduler(num_blocks=100, block_size=2, max_batch_requests=8)
    members = submit_beams(scheduler, "search", range(3), 3)
    for _ in range(3):
        scheduler.apply(run_plan(scheduler.schedule(0.0)), 0.0)
    assert members[0].num_known == 6
    scheduler.state.preempt(members[1], 1.0)
    assert beam_group(members[0]).blocks_to_join(2) == 2 * (3 - 1)  # three blocks of each, of which one is shared


def test_a_search_that_has_not_joined_is_promised_a_spare_block_for_each_beam() -> None:
    scheduler = make_scheduler(num_blocks=100, block_size=4, max_batch_tokens=4, max_batch_requests=8)
    leader = submit_beams(scheduler, "search", range(6), 3)[0]
    scheduler.schedule(0.0)
    assert list(scheduler.running) == [leader]
    assert scheduler.kv.to_come(leader) == 1 + 2 * (2 - 1) + 3  # its own, those of the others, and the spare
