"""A proposer that fails, or is interrupted: nothing hangs, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift.core.events import Event, RequestFinished
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.request import FinishReason, Request
from chairlift.errors import EngineDead
from chairlift.speculation.control.controller import SpeculationController, Wanted
from chairlift.speculation.control.draft_length import FixedLength
from tests.engine.fake_executor import PARAMS, make_engine, run_to_end, tokens_of
from tests.speculation.guessing import Guesser


class Failing(Guesser):
    """From some call of a method on, every call of every method fails."""

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

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        self._note("foresee")
        return [0] * len(requests)

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self._note("propose")
        return super().propose(wanted)

    @property  # type: ignore[override]
    def spent(self) -> float:
        self._note("spent")
        return 0.0

    def forget(self, request_id: str) -> None:
        self._note("forget")


@pytest.mark.parametrize("method", ["foresee", "propose", "spent"])
def test_every_request_ends_once_and_the_engine_is_dead(method: str) -> None:
    engine, _ = make_engine()
    engine.scheduler.speculation = SpeculationController(Failing(method, ValueError("cannot guess")), FixedLength(3))
    ids = [one for length in (1, 20, 70) for one in engine.submit(list(range(10, 10 + length)), PARAMS.clone(n=3))]
    events = run_to_end(engine)
    endings = [(event.request_id, event.ending.reason) for event in events if isinstance(event, RequestFinished)]
    assert sorted(endings) == sorted((one, FinishReason.ERROR) for one in ids)
    assert isinstance(engine.fatal, ValueError)
    check_quiescent(engine.scheduler)
    with pytest.raises(EngineDead):
        engine.submit([10], PARAMS)


@pytest.mark.parametrize("method", ["foresee", "propose"])
def test_interrupted_while_it_guesses_the_step_is_planned_again(method: str) -> None:
    """Blocks that completions of one prompt share are copied on the first write: the copy must not be forgotten."""
    outputs = []
    for disturbed in (False, True):
        engine, _ = make_engine()
        proposer = Failing(method if disturbed else "nothing", KeyboardInterrupt())
        engine.scheduler.speculation = SpeculationController(proposer, FixedLength(3))
        engine.submit(list(range(10, 20)), PARAMS.clone(n=3))
        events: list[Event] = []
        for _ in range(30):
            try:
                events += engine.step()
            except KeyboardInterrupt:
                proposer.fails = False
                check_accounting(engine.scheduler)
                assert not engine.scheduler.running, "they compute their tokens again"
        outputs.append(tokens_of(events))
        assert proposer._calls >= 3 or not disturbed
        check_quiescent(engine.scheduler)
    assert outputs[0] == outputs[1]
