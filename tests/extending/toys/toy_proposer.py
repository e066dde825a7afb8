"""A proposer: the last two tokens again, since texts often alternate (`toy`, or `toy:N` for at most N tokens)."""

from collections.abc import Sequence

from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import Draft, DraftTerms, StandaloneProposer


@PROPOSERS.register("toy")
class AlternatingProposer(StandaloneProposer):
    name = "toy"
    max_length = 4  # draft tokens of a request in one step

    def __init__(self, argument: str = "") -> None:
        if argument and not argument.isdecimal():
            raise InvalidParameter("speculate", f"toy takes a number of tokens, got {argument!r}")
        self._most = int(argument or self.max_length)
        self.accepted = 0

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        for request in requests:
            length = min(terms.length(request), self._most)
            tokens = (list(request.tokens[-2:]) * length)[:length]
            drafts.append(Draft(tokens, levels=[5] * length))
        return drafts

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        self.accepted += accepted
