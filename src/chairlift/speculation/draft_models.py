"""Draft networks: another, smaller model with the same tokenizer, the target's own first layers, or a draft head that
reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.request import Request
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.resolve import resolve_model
from chairlift.loading.stored_weight import dequantized_matrices
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.drafter import ComputedBatch, DraftNetwork, DraftPass, DraftTask
from chairlift.speculation.head_layers import MAX_LENGTH, DraftHead, HeadConfig, is_head
from chairlift.speculation.head_states import HeadStates, KeptStates, RecentStates, UnwrittenBlocks
from chairlift.speculation.proposers.base import A_FEW, Draft, LoadedProposer
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # numba takes its time
    from chairlift.speculation.fused_head import FusedHead


class HeadNetwork(DraftNetwork):
    """Computes prompts when the target does, because they stay in the prefix cache. The target's states of generated
    tokens are kept until the next draft.

    What the target begins of a block is cleared before the head reads it. So where the head has not computed a token it
    reads zeros, or a wrong draft token, but never what another request left there. (Zeros give better drafts than
    masking.)"""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.token_ids = head.token_ids
        self._ids: list[int] = head.token_ids.tolist()
        self.unwritten = UnwrittenBlocks()
        self._kept = KeptStates(head.feature_size, head.target.dtype, head.target.device)
        self.states: HeadStates = self._kept
        self.one_call: FusedHead | None = head.fused_head

    def attach(self, slots: Slots) -> RecentStates:
        recent = self.states = RecentStates(self.head, self.unwritten, slots)
        return recent

    def first_position(self, request: Request) -> int:
        return self.states.first_position(request)

    def run_pass(
        self, batch: StepBatch, before: Tensor | None, last_rows: Tensor | None, attention: StepAttention
    ) -> DraftPass:
        assert before is not None
        previous = before if last_rows is None else self.head.join(before)  # [T, hidden]
        states = self.head.states(batch.tokens, previous, batch.positions, attention)
        if last_rows is not None:
            states = states.index_select(0, last_rows)
        return DraftPass(self.head.scores(states), states)

    def begin_draft(self, tables: Sequence[Sequence[int]], storage: KVStorage) -> None:
        slots = self.unwritten.take(tables, storage.block_size)
        if slots:
            storage.clear(self.head.attention_layers[0].index, slots)

    # ---- steps of the target --------------------------------------------------------------------------------------

    def observe_step(self, step: ComputedBatch, storage: KVStorage) -> None:
        """Compute the prompts of a step and keep its states, where steps do not store them by themselves."""
        chunks, features = step.plan.chunks, self.head.features(step.hidden)
        has_prompts = not all(chunk.decodes for chunk in chunks)
        self.unwritten.note(step.plan, storage.block_size)
        if has_prompts:
            self.begin_draft([chunk.table for chunk in chunks], storage)
            self._compute_prompts(step, features, self._kept.before(chunks, features), storage)
        self._kept.keep(step, features, has_prompts)

    def _compute_prompts(self, step: ComputedBatch, features: Tensor, before: Tensor, storage: KVStorage) -> None:
        """Compute the whole step, since it is one batch: decodes are computed again for the next draft.

        before [chunks, features]: those of the token before each chunk."""
        batch, attention = step.batch, step.attention
        places = [*zip(step.first_rows, step.plan.chunks, strict=False)]
        previous = torch.zeros_like(features)
        previous[1:] = features[:-1]
        firsts = sent([offset for offset, _ in places], previous.device)
        previous.index_copy_(0, firsts, before)
        if self.one_call is not None and attention.work(self.head.attention_layers[0]) is not None:
            prompts = [range(offset, offset + chunk.count) for offset, chunk in places if not chunk.decodes]
            rows = torch.tensor([row for some in prompts for row in some])
            positions, slots = batch.positions[rows], batch.layout.slot_mapping[rows]
            self.one_call.store(self._embed(batch.tokens[rows]), previous[rows], positions, slots, storage)
        else:
            self.head.store_keys(batch.tokens, self.head.join(previous), batch.positions, attention)

    def forget(self, request_id: str) -> None:
        self.states.forget(request_id)

    # ---- a head with a kernel that drafts all tokens of a step in one call ----------------------------------------

    def _embed(self, tokens: Tensor) -> np.ndarray:
        embedded: np.ndarray = self.head.target.embed(tokens).numpy()
        return embedded

    def catch_up(self, tasks: Sequence[DraftTask], storage: KVStorage) -> bool:
        assert self.one_call is not None
        size = storage.block_size
        rows: list[tuple[int, int, int]] = []  # token, position, slot
        spans: list[tuple[Request, int]] = []
        for task in tasks:
            request, first, last = task.request, self._kept.first_position(task.request), task.request.num_known - 1
            if last - first >= A_FEW:
                positions = range(first, last)
                rows += [(request.tokens[p], p, task.table[p // size] * size + p % size) for p in positions]
                spans.append((request, last - first))
        if rows:
            tokens, token_positions, slots = torch.tensor(rows).T.contiguous()
            self.one_call.store(self._embed(tokens), self._kept.take(spans), token_positions, slots, storage)
        return bool(rows)

    def draft(self, tasks: Sequence[DraftTask], storage: KVStorage) -> list[Draft]:
        assert self.one_call is not None
        starts = [self._kept.first_position(task.request) for task in tasks]
        known = [task.request.tokens[start:] for task, start in zip(tasks, starts, strict=True)]
        features = self._kept.take([(task.request, len(own)) for task, own in zip(tasks, known, strict=True)])
        embedded = self._embed(torch.tensor([token for own in known for token in own]))
        choices = self.one_call.draft(tasks, starts, embedded, features.numpy(), storage)
        drafts = zip(choices.tokens.tolist(), choices.levels.tolist(), choices.kept.tolist(), strict=True)
        ids = self._ids
        return [Draft([ids[token] for token in some[:kept]], levels[:kept]) for some, levels, kept in drafts]


_PROBE = 'The quick brown fox\'s 12 jumps:\n\tover «lazy» dogs, été 2026, 犬 🐕 <|im_end|> {"a": [1.5]}'


class ModelPasses(DraftNetwork):
    """Passes of a network that is a model: it reads nothing but tokens."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def run_pass(
        self, batch: StepBatch, before: Tensor | None, last_rows: Tensor | None, attention: StepAttention
    ) -> DraftPass:
        return DraftPass(self._model.logits(self._model.hidden_states(batch, attention, last_rows).last), None)


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
