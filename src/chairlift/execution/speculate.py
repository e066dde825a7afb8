"""What `speculate` asks for, and the parts that do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.core.cost_model import CostModel
from chairlift.core.draft_length import AdaptiveLength, DraftLength, FixedLength
from chairlift.core.ngram import NgramProposer
from chairlift.core.request import Request
from chairlift.core.speculation import Proposer, Speculation, Wanted
from chairlift.errors import InvalidParameter
from chairlift.execution.structured import StructuredOutput

# By kind. With the token before them they are a chunk that attention treats as a decode.
MAX_DRAFTS = {"ngram": NgramProposer.max_length, "layers": 7, "draft": 7}
CHOICES = "ngram, layers:N or draft:PATH"


@dataclass(frozen=True, slots=True)
class Speculate:
    """The option, taken apart: `kind` is ngram, layers or draft."""

    kind: str
    layers: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: object) -> Speculate:
        kind, _, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind == "ngram" and text == kind:
            return cls(kind)
        if kind == "layers" and argument.isdecimal() and int(argument):
            return cls(kind, layers=int(argument))
        if kind == "draft" and argument:
            return cls(kind, path=argument)
        raise InvalidParameter("speculate", f"must be {CHOICES}, got {text!r:.100}")


def check_speculate(speculate: str | None, draft_length: int | None) -> None:
    if speculate is None:
        if draft_length is not None:
            raise InvalidParameter("draft_length", "only goes with speculate")
        return
    most = MAX_DRAFTS[Speculate.parse(speculate).kind]
    if draft_length is None:
        return
    if isinstance(draft_length, bool) or not isinstance(draft_length, int) or not 1 <= draft_length <= most:
        problem = f"must be an integer from 1 to {most} with {speculate!r:.100}, got {draft_length!r}"
        raise InvalidParameter("draft_length", problem)


def drafts_per_request(speculate: str | None, draft_length: int | None) -> int:
    """At most, in one step."""
    return 0 if speculate is None else draft_length or MAX_DRAFTS[Speculate.parse(speculate).kind]


def make_speculation(
    proposer: Proposer,
    draft_length: int | None,
    cost: CostModel,
    structured: StructuredOutput | None,
    most_drafts: int | None = None,
) -> Speculation:
    if draft_length is not None and draft_length > proposer.max_length:
        problem = f"{proposer.name} guesses at most {proposer.max_length} tokens, got {draft_length}"
        raise InvalidParameter("draft_length", problem)
    length: DraftLength = AdaptiveLength(cost) if draft_length is None else FixedLength(draft_length)
    guesser = proposer if structured is None else GrammaticalDrafts(proposer, structured)
    return Speculation(guesser, length, most_drafts)


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
