"""Draft tokens from the target's own first layers, with its norm and head."""

from __future__ import annotations

from functools import partial

from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculation.draft_network import ComputedBatch, ModelPasses, require_decoder
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.proposers.base import LoadedProposer


class FirstLayers(ModelPasses):
    """What these layers write for a draft token is what the target writes there again when it verifies it."""

    catches_up_in_parts = False  # it is never more than one token behind

    def __init__(self, model: Decoder, num_layers: int) -> None:
        super().__init__(model.first_layers(num_layers))

    def first_position(self, request: Request) -> int:
        return request.num_computed

    def observe_step(self, step: ComputedBatch) -> None:
        pass

    def state_bytes(self, num_requests: int) -> int:
        return 0

    def forget(self, request_id: str) -> None:
        pass


def load_first_layers(target: CausalLM, num_layers: int) -> LoadedProposer:
    speculate = f"layers:{num_layers}"
    model = require_decoder(target, speculate)
    if num_layers >= len(model.layers):
        raise InvalidParameter("speculate", f"{speculate!r}: the model has {len(model.layers)} layers; use fewer")
    return LoadedProposer(partial(DraftModelProposer, speculate, FirstLayers(model, num_layers)))
