"""What guesses cost where a step could be planned before the last tokens are known, if it were not for them."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.cost_model import CostModel
from chairlift.core.plan import Chunk, StepPlan, StepResult
from chairlift.core.request import Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.draft_length import _PROBE_EVERY, AdaptiveLength
from tests.speculation.guessing import Guesser
from tests.speculation.test_draft_length import cost_model


def decoding(unread: int = 0) -> tuple[Request, Chunk]:
    request = Request("r", [1, 2, 3], SamplingParams(), max_new_tokens=9, arrival=0.0)
    request.append(4)
    request.start_from(3 + unread)
    request.num_unread = unread
    return request, Chunk(request, 3 + unread, 1, [0], samples=True)


def test_steps_that_waited_for_guesses_count_as_theirs_even_if_there_were_none() -> None:
    _, chunk = decoding()
    speculation = SpeculationController(Guesser(lambda request, length: []), AdaptiveLength(CostModel()))
    result = StepResult(StepPlan(0, (chunk,)), [5], [None])
    for _ in range(8):
        speculation.observe(result, 1.0)
    assert speculation.length.allows_drafts(1)
    for _ in range(60):
        speculation.observe(result, 1.2, waited=True)
    assert not speculation.length.allows_drafts(1)


class Expensive:
    """Takes so long that no draft pays, and only trials are made."""

    max_length = 7
    judges = sleeps = False

    def seconds(self, num_requests: int, length: int) -> float:
        return 0.7 * length


def test_a_trial_is_due_until_the_last_token_is_known() -> None:
    length = AdaptiveLength(cost_model(step=1.0, token=0.0))

    def choose(unread: int) -> Sequence[int]:
        request, chunk = decoding(unread)
        return length.choose([(request, 0)], [chunk], Expensive())

    asked = [choose(unread=1)[0] for _ in range(_PROBE_EVERY + 3)]
    assert asked == [0] * (_PROBE_EVERY - 1) + [1] * 4
    assert [choose(unread=0)[0], choose(unread=0)[0], choose(unread=1)[0]] == [1, 0, 0]
