"""The option `speculate`, parsed and checked."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.errors import InvalidParameter

# By kind. With the token before them they are a chunk that attention treats as a decode.
MAX_DRAFTS = {"ngram": 15, "layers": 7, "draft": 7}
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
