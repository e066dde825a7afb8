"""A proposer that fails or is interrupted: every request still ends, and no block is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift.core.events import Event, RequestFinished
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.request import FinishReason, Request
from chairlift.errors import EngineDead
from chairlift.speculation.proposers.base import Draft, DraftTerms
from tests.engine.fake_executor import PARAMS, make_engine, run_to_end, tokens_of
from tests.speculation.drafting import FixedProposer, fixed_length


class FailingProposer(FixedProposer):
    """From the third call of one method on, every call of every method fails."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__(lambda request, length: [7] * length)
        self._method, self._error = method, error
        self._calls, self.fails = 0, False

    def _note(self, method: str) -> None:
        if method == self._method:
            self._calls += 1
            self.fails = self.fails or self._calls == 3
        if self.fails:
            raise self._error

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft | None]:
        self._note("propose")
        return super().propose(requests, terms)

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        self._note("observe")

    def forget(self, request_id: str) -> None:
        self._note("forget")


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_every_request_ends_once_and_the_engine_is_dead(method: str) -> None:
    engine, _ = make_engine()
    engine.scheduler.speculation = fixed_length(FailingProposer(method, ValueError("cannot draft")), 3)
    ids = [one for length in (1, 20, 70) for one in engine.submit(list(range(10, 10 + length)), PARAMS.clone(n=3))]
    events = run_to_end(engine)
    endings = [(event.request_id, event.ending.reason) for event in events if isinstance(event, RequestFinished)]
    assert sorted(endings) == sorted((one, FinishReason.ERROR) for one in ids)
    assert isinstance(engine.fatal, ValueError)
    check_quiescent(engine.scheduler)
    with pytest.raises(EngineDead):
        engine.submit([10], PARAMS)


def test_a_step_interrupted_while_drafting_is_planned_again() -> None:
    """Blocks shared by completions of one prompt are copied on the first write: the copy must not be lost."""
    outputs = []
    for disturbed in (False, True):
        engine, _ = make_engine()
        proposer = FailingProposer("propose" if disturbed else "nothing", KeyboardInterrupt())
        engine.scheduler.speculation = fixed_length(proposer, 3)
        engine.submit(list(range(10, 20)), PARAMS.clone(n=3))
        events: list[Event] = []
        for _ in range(30):
            try:
                events += engine.step()
            except KeyboardInterrupt:
                proposer.fails = False
                check_accounting(engine.scheduler)
                assert not engine.scheduler.running, "their tokens are computed again"
        outputs.append(tokens_of(events))
        assert proposer._calls >= 3 or not disturbed
        check_quiescent(engine.scheduler)
    assert outputs[0] == outputs[1]
