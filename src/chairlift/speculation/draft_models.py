"""Draft networks that are models: another, smaller one with the same tokenizer, or the target's own first layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.resolve import resolve_model
from chairlift.loading.stored_weight import dequantized_matrices
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculation.draft_head import HeadNetwork
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.drafter import ComputedBatch, DraftNetwork, DraftPass
from chairlift.speculation.head_layers import MAX_LENGTH, DraftHead, HeadConfig, is_head
from chairlift.speculation.proposers.base import LoadedProposer
from chairlift.text.tokenizer import Tokenizer

_PROBE = 'The quick brown fox\'s 12 jumps:\n\tover «lazy» dogs, été 2026, 犬 🐕 <|im_end|> {"a": [1.5]}'


class ModelPasses(DraftNetwork):
    """Passes of a network that is a model: it reads nothing but tokens."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def first_pass(
        self, batch: StepBatch, features: Tensor | None, last_rows: Tensor, attention: StepAttention
    ) -> DraftPass:
        return self._pass(batch, attention, last_rows)

    def next_pass(self, batch: StepBatch, states: Tensor | None, attention: StepAttention) -> DraftPass:
        return self._pass(batch, attention, None)

    def _pass(self, batch: StepBatch, attention: StepAttention, rows: Tensor | None) -> DraftPass:
        return DraftPass(self._model.logits(self._model.hidden_states(batch, attention, rows).last), None)


class DraftModel(ModelPasses):
    """Computes prompts when the target does, and the tokens that a request got during a pause when it is next asked."""

    catches_up_in_parts = True

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self._computed: dict[str, int] = {}  # request id -> how many of its first tokens

    def first_position(self, request: Request) -> int:
        return min(self._computed.get(request.id, 0), request.num_computed)

    def computed(self, request: Request, end: int) -> None:
        self._computed[request.id] = end

    def observe_step(self, step: ComputedBatch, storage: KVStorage) -> None:
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


class FirstLayers(ModelPasses):
    """Never more than one token behind: what these layers write for a draft token is what the target writes there again
    when it verifies it."""

    def __init__(self, model: Decoder, num_layers: int) -> None:
        super().__init__(model.first_layers(num_layers))

    def first_position(self, request: Request) -> int:
        return request.num_computed


def load_first_layers(target: CausalLM, num_layers: int) -> LoadedProposer:
    speculate = f"layers:{num_layers}"
    model = require_decoder(target, speculate)
    if num_layers >= len(model.layers):
        raise InvalidParameter("speculate", f"{speculate!r}: the model has {len(model.layers)} layers; use fewer")
    return LoadedProposer(partial(DraftModelProposer, speculate, FirstLayers(model, num_layers)))


def load_draft(path: str, target: CausalLM, tokenizer: Tokenizer, max_model_len: int) -> LoadedProposer:
    speculate = f"draft:{path}"
    checkpoint = open_checkpoint(shipped_draft(path) or resolve_model(path, progress=False))
    with torch.inference_mode():
        if not is_head(checkpoint.config):
            return load_draft_model(speculate, checkpoint, target, tokenizer, max_model_len)
        config, model = HeadConfig.of(checkpoint.config), require_decoder(target, speculate)
        head = DraftHead(config, model, checkpoint.tensors(), index=len(model.attention_layers))
        make = partial(
            DraftModelProposer, speculate, HeadNetwork(head), layers=head.attention_layers, max_length=MAX_LENGTH
        )
        return LoadedProposer(make, head.attention_layers, head.num_weight_bytes())


def shipped_draft(name: str) -> Path | None:
    """The folder of a draft head that comes with the package, by its model's name; None if there is none."""
    if not name or Path(name).exists() or "/" in name:
        return None
    folder = Path(str(resources.files("chairlift.speculation"))) / "pretrained" / name
    return folder if folder.is_dir() else None


def require_decoder(model: CausalLM, speculate: str) -> Decoder:
    if not isinstance(model, Decoder):
        raise InvalidParameter("speculate", f"{speculate!r}: only ngram works with models that transformers runs")
    return model
