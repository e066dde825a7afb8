"""The option `speculate`, NAME or NAME:ARGUMENT, checked before anything is loaded."""

from __future__ import annotations

from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import ProposerFactory


def proposer_factory(speculate: object) -> ProposerFactory:
    if not isinstance(speculate, str):
        raise InvalidParameter("speculate", f"must be a name such as 'ngram', got {speculate!r:.100}")
    name, _, argument = speculate.partition(":")
    return PROPOSERS.get(name)(argument)


def speculate_forms() -> list[str]:
    """Every choice as it is written: NAME or NAME:ARGUMENT."""
    arguments = {name: PROPOSERS.get(name).argument for name in PROPOSERS.names()}
    return [f"{name}:{argument}" if argument else name for name, argument in arguments.items()]


def check_speculate(speculate: str | None, draft_length: int | None) -> None:
    if speculate is None:
        if draft_length is not None:
            raise InvalidParameter("draft_length", "only goes with speculate")
        return
    most = proposer_factory(speculate).max_length
    if draft_length is None:
        return
    if isinstance(draft_length, bool) or not isinstance(draft_length, int) or not 1 <= draft_length <= most:
        problem = f"must be an integer from 1 to {most} with {speculate!r:.100}, got {draft_length!r}"
        raise InvalidParameter("draft_length", problem)


def drafts_per_request(speculate: str | None, draft_length: int | None) -> int:
    """The most draft tokens of a request in one step."""
    return 0 if speculate is None else draft_length or proposer_factory(speculate).max_length
