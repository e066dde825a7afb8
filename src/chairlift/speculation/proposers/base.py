"""How a choice of `speculate` becomes a proposer: `NAME:ARGUMENT` is checked at once, weights are loaded later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.speculation.control.proposer import Proposer


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
