"""How a choice of `speculate` becomes a proposer: `NAME:ARGUMENT` is checked at once, weights are loaded later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.speculation.control.proposer import Proposer
from chairlift.speculation.proposers import PROPOSERS


@dataclass(frozen=True, slots=True)
class LoadedProposer:
    """A proposer before the KV cache is sized."""

    make: Callable[..., Proposer]  # (attention, storage, model, repeatable) -> the proposer
    layers: tuple[Any, ...] = ()  # the attention layers whose keys and values it adds to the KV cache
    weight_bytes: int = 0


class ProposerFactory(ABC):
    """What is registered in PROPOSERS, called with the argument behind the colon. Its module imports no torch."""

    argument: str = ""  # what must follow the colon, as help texts show it: N, PATH
    max_length: int  # draft tokens of a request in one step

    def __init__(self, argument: str) -> None:
        """Check the argument; raise InvalidParameter if it is none of this proposer's."""
        if argument:
            raise InvalidParameter("speculate", f"takes no argument here, got {argument!r:.100}")

    @abstractmethod
    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        """Load what drafts the tokens of `model` (a CausalLM)."""


class StandaloneProposer(ProposerFactory, Proposer):
    """A proposer that needs neither weights nor the KV cache, and so is its own factory."""

    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        return LoadedProposer(lambda *_: self)


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
