"""The proposers that run a network: `draft:PATH`, a draft head or a smaller model with the same tokenizer, and
`layers:N`, the model's own first N layers. What makes them is imported when they are loaded."""

from __future__ import annotations

from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import LoadedProposer, ProposerFactory

MAX_DRAFTS = 7  # Together with the last known token, attention still treats them as a decode.


@PROPOSERS.register("draft")
class DraftModelFactory(ProposerFactory):
    argument = "PATH"
    max_length = MAX_DRAFTS

    def __init__(self, argument: str) -> None:
        if not argument:
            raise InvalidParameter("speculate", "'draft' needs a folder or a model's name, as in draft:PATH")
        self._path = argument

    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        from chairlift.speculation.draft_models import load_draft

        return load_draft(self._path, model, tokenizer, max_model_len)


@PROPOSERS.register("layers")
class FirstLayersFactory(ProposerFactory):
    argument = "N"
    max_length = MAX_DRAFTS

    def __init__(self, argument: str) -> None:
        if not (argument.isdecimal() and int(argument)):
            raise InvalidParameter("speculate", f"'layers' needs a number of layers, as in layers:2, got {argument!r}")
        self._num_layers = int(argument)

    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        from chairlift.speculation.draft_models import load_first_layers

        return load_first_layers(model, self._num_layers)
