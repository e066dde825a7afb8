"""`layers:N`: draft tokens from the model's own first N layers."""

from __future__ import annotations

from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import LoadedProposer, ProposerFactory


@PROPOSERS.register("layers")
class FirstLayersFactory(ProposerFactory):
    argument = "N"
    max_length = 7  # Together with the last known token, attention still treats them as a decode.

    def __init__(self, argument: str) -> None:
        if not (argument.isdecimal() and int(argument)):
            raise InvalidParameter("speculate", f"'layers' needs a number of layers, as in layers:2, got {argument!r}")
        self._num_layers = int(argument)

    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        from chairlift.speculation.draft_models import load_first_layers

        return load_first_layers(model, self._num_layers)
