"""`draft:PATH`: draft tokens from a draft head, or from a smaller model with the same tokenizer."""

from __future__ import annotations

from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.speculation.proposers import PROPOSERS
from chairlift.speculation.proposers.base import LoadedProposer, ProposerFactory


@PROPOSERS.register("draft")
class DraftModelFactory(ProposerFactory):
    argument = "PATH"
    max_length = 7  # Together with the last known token, attention still treats them as a decode.

    def __init__(self, argument: str) -> None:
        if not argument:
            raise InvalidParameter("speculate", "'draft' needs a folder or a model's name, as in draft:PATH")
        self._path = argument

    def load(self, model: Any, tokenizer: Any, max_model_len: int) -> LoadedProposer:
        from chairlift.speculation.draft_models import load_draft

        return load_draft(self._path, model, tokenizer, max_model_len)
