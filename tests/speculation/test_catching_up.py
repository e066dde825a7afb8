"""What a draft head computes after a pause is no part of what its drafts cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.startup import LoadedModel
from chairlift.speculation import draft_proposer
from chairlift.speculation.proposers.base import Draft, DraftTerms
from tests.speculation.drafting import draft_by_pattern
from tests.speculation.running import drafter_of, run, start

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=90, ignore_eos=True)


def drafts_after_pauses(tiny: LoadedModel, draft: Path) -> tuple[list[bool], dict[tuple[int, ...], list[int]]]:
    """For each step with drafts, whether it caught up with a pause; and all drafts, by the tokens before them."""
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=4)
    draft_by_pattern(engine.scheduler.speculation, lambda step: step % 40 > 32)
    proposer = drafter_of(engine)
    propose = proposer.propose
    caught_up: list[bool] = []
    drafted: dict[tuple[int, ...], list[int]] = {}

    def note_drafts(requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft]:
        drafts = propose(requests, terms)
        caught_up.append(terms.did_extra_work)
        drafted.update({tuple(one.tokens): list(some.tokens) for one, some in zip(requests, drafts, strict=True)})
        return drafts

    proposer.propose = note_drafts  # type: ignore[method-assign]
    run(engine, [([70 + i, 80, 90], PARAMS.clone(seed=i)) for i in range(3)])
    return caught_up, drafted


def test_a_draft_head_catches_up_in_a_pass_of_its_own(
    tiny: LoadedModel, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_proposer, "CATCH_UP_REQUESTS", 2)  # of three requests
    caught_up, drafted = drafts_after_pauses(tiny, draft)
    assert caught_up[0]
    assert 2 <= sum(caught_up) < len(caught_up) / 2, "once after each pause"
    monkeypatch.setattr(draft_proposer, "A_FEW", 1000)
    never, together = drafts_after_pauses(tiny, draft)
    assert not any(never)
    assert drafted == together
