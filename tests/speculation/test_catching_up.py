"""What a draft head computes after a pause is no part of what its guesses cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.startup import LoadedModel
from chairlift.runner.base import ModelRunner
from chairlift.speculation import network_proposer as drafter
from chairlift.speculation.control.controller import Wanted
from tests.speculation.running import run, start
from tests.speculation.test_networks import Seldom

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=90, ignore_eos=True)


def guesses_after_pauses(tiny: LoadedModel, draft: Path) -> tuple[list[bool], dict[tuple[int, ...], list[int]]]:
    """Of each step with guesses, whether it caught up with something; and all guesses, by the tokens before them."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=4)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation.length = Seldom()
    proposer = speculation.proposer
    propose = proposer.propose
    caught_up: list[bool] = []
    said: dict[tuple[int, ...], list[int]] = {}

    def listen(wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        drafts = propose(wanted)
        assert proposer.spent > proposer.catching_up
        caught_up.append(proposer.catching_up > 0)
        said.update({tuple(one.request.tokens): list(some) for one, some in zip(wanted, drafts, strict=True)})
        return drafts

    proposer.propose = listen  # type: ignore[method-assign]
    run(engine, [([70 + i, 80, 90], PARAMS.clone(seed=i)) for i in range(3)])
    return caught_up, said


def test_a_draft_head_catches_up_in_a_pass_of_its_own(
    tiny: LoadedModel, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "CAUGHT_UP_AT_ONCE", 2)  # of three requests
    caught_up, said = guesses_after_pauses(tiny, draft)
    assert caught_up[0]
    assert 2 <= sum(caught_up) < len(caught_up) / 2, "once after each pause"
    monkeypatch.setattr(drafter, "A_FEW", 1000)
    never, together = guesses_after_pauses(tiny, draft)
    assert not any(never)
    assert said == together


def test_what_a_pass_takes_is_not_judged_by_a_bad_moment_or_a_larger_batch(tiny: LoadedModel) -> None:
    runner = start(tiny, speculate="layers:1").executor
    assert isinstance(runner, ModelRunner)
    proposer = runner.drafter
    assert proposer is not None
    proposer._note_seconds(1, 1.0)  # the first one was compiled
    proposer._note_seconds(1, 0.01)
    assert proposer.seconds(1, 1) < 0.02
    proposer._pass_seconds = {7: 0.64}  # of 64 requests
    assert proposer.seconds(1, 1) == pytest.approx(0.01)
    assert proposer.seconds(64, 2) == proposer.seconds(128, 2) == pytest.approx(1.28)
