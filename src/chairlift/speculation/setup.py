"""What `speculate` asks for, and the parts that do it."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.cost_model import CostModel
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.speculation.control.controller import Proposer, SpeculationController, Wanted
from chairlift.speculation.control.draft_length import AdaptiveLength, DraftLength, FixedLength
from chairlift.structured.output import StructuredOutput


def make_speculation(
    proposer: Proposer,
    draft_length: int | None,
    cost: CostModel,
    structured: StructuredOutput | None,
    most_drafts: int | None = None,
) -> SpeculationController:
    if draft_length is not None and draft_length > proposer.max_length:
        problem = f"{proposer.name} guesses at most {proposer.max_length} tokens, got {draft_length}"
        raise InvalidParameter("draft_length", problem)
    length: DraftLength = AdaptiveLength(cost) if draft_length is None else FixedLength(draft_length)
    guesser = proposer if structured is None else GrammaticalDrafts(proposer, structured)
    return SpeculationController(guesser, length, most_drafts)


class GrammaticalDrafts:
    """Another proposer's drafts, as far as the grammars of structured requests allow them."""

    def __init__(self, proposer: Proposer, structured: StructuredOutput) -> None:
        self.name = proposer.name
        self.max_length = proposer.max_length
        self.judges = proposer.judges
        self.sleeps = proposer.sleeps
        self._proposer = proposer
        self._structured = structured

    @property
    def asleep(self) -> bool:
        return self._proposer.asleep

    @asleep.setter
    def asleep(self, value: bool) -> None:
        self._proposer.asleep = value

    @property
    def spent(self) -> float:
        return self._proposer.spent

    @property
    def catching_up(self) -> float:
        return self._proposer.catching_up

    def foresee(self, requests: Sequence[Request]) -> Sequence[int | None]:
        return self._proposer.foresee(requests)

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        proposed = self._proposer.propose(wanted)
        return [
            drafts if one.request.params.structure is None else self._allowed(one.request, drafts)
            for one, drafts in zip(wanted, proposed, strict=True)
        ]

    def _allowed(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        return drafts[: self._structured.num_allowed(request, drafts)]

    def seconds(self, num_requests: int, length: int) -> float:
        return self._proposer.seconds(num_requests, length)

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        self._proposer.learn(request, proposed, accepted)

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)
