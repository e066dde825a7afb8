"""Draft tokens from another, smaller model with the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.stored_weight import dequantized_matrices
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.speculation.draft_network import ComputedBatch, ModelPasses, require_decoder
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.proposers.base import LoadedProposer
from chairlift.text.tokenizer import Tokenizer

_PROBE = 'The quick brown fox\'s 12 jumps:\n\tover «lazy» dogs, été 2026, 犬 🐕 <|im_end|> {"a": [1.5]}'


class DraftModel(ModelPasses):
    """Computes prompts when the target does, and the tokens that a request got during a pause when it is next asked."""

    catches_up_in_parts = True

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self._computed: dict[str, int] = {}  # request id -> how many of its first tokens

    def first_position(self, request: Request) -> int:
        return min(self._computed.get(request.id, 0), request.num_computed)

    def scores(self, batch: StepBatch, chunks: Sequence[Chunk], last_rows: Tensor, attention: StepAttention) -> Tensor:
        for chunk in chunks:
            self._computed[chunk.request.id] = chunk.end
        return super().scores(batch, chunks, last_rows, attention)

    def drafted(self, request: Request, count: int) -> None:
        self._computed[request.id] = request.num_known + count

    def observe_step(self, step: ComputedBatch) -> None:
        plan, batch = step.plan, step.batch
        has_prompts = not all(chunk.decodes for chunk in plan.chunks)
        if has_prompts:
            no_rows = batch.tokens[:0]  # only keys and values are needed
            self._model.hidden_states(batch, step.attention, no_rows)
        rows = iter(step.kept)
        for offset, chunk in zip(step.first_rows, plan.chunks, strict=False):
            computed = self._computed.get(chunk.request.id, 0)
            # Before a prompt's chunk are its other chunks, or cached blocks, which an earlier request filled.
            if has_prompts and (not chunk.decodes or computed >= chunk.start):
                computed = chunk.end
            right = chunk.start + next(rows) - offset + 1 if chunk.samples else chunk.end
            self._computed[chunk.request.id] = min(computed, right)  # what it computed of wrong draft tokens is void

    def state_bytes(self, num_requests: int) -> int:
        return 0

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)


def load_draft_model(
    speculate: str, checkpoint: Checkpoint, target: CausalLM, tokenizer: Tokenizer, max_model_len: int
) -> LoadedProposer:
    own = make_tokenizer(checkpoint)
    if own.encode(_PROBE) != tokenizer.encode(_PROBE):
        raise InvalidParameter("speculate", f"{speculate!r}: that model splits text into other tokens than this one")
    built = build_model(
        checkpoint.config, dequantized_matrices(checkpoint.stored()), dtype=target.dtype, device=target.device
    )
    model = require_decoder(built, speculate)
    if model.vocab_size > target.vocab_size:
        raise InvalidParameter("speculate", f"{speculate!r}: that model has more tokens than this one")
    if model.max_len < max_model_len:
        problem = f"takes {model.max_len} tokens, less than max_model_len ({max_model_len})"
        raise InvalidParameter("speculate", f"{speculate!r}: that model {problem}")
    if model.recurrent_layers:
        raise InvalidParameter("speculate", f"{speculate!r}: that model has recurrent layers, which cannot draft")
    first = len(target.attention_layers)
    for layer in model.layers:
        attention = layer.attention
        attention.layer = replace(attention.layer, index=first + attention.layer.index)
    layers = tuple(layer.attention.layer for layer in model.layers)
    make = partial(DraftModelProposer, speculate, DraftModel(model), layers=layers)
    return LoadedProposer(make, layers, model.num_weight_bytes())
