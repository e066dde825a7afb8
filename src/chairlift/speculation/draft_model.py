"""Making the proposer that `speculate` names, before the KV cache is sized: it may need layers of its own there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.base import AttentionLayer
from chairlift.attention.storage import KVStorage
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.store import resolve_model
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.speculation.control.controller import Proposer
from chairlift.speculation.control.option import Speculate
from chairlift.speculation.draft_head import DraftHead
from chairlift.speculation.head_config import HeadConfig, is_head
from chairlift.speculation.head_network import Head
from chairlift.speculation.network_proposer import NetworkProposer
from chairlift.speculation.networks import DraftNetwork, FirstLayers, SmallModel
from chairlift.speculation.ngram import NgramProposer
from chairlift.text.tokenizer import Tokenizer

_PROBE = 'The quick brown fox\'s 12 jumps:\n\tover «lazy» dogs, été 2026, 犬 🐕 <|im_end|> {"a": [1.5]}'


@dataclass(frozen=True, slots=True)
class Draft:
    """What is loaded for speculation. `layers`: what it keeps in the KV storage, behind the target's own."""

    name: str
    network: DraftNetwork | None = None  # None: no network is asked
    layers: tuple[AttentionLayer, ...] = ()
    weight_bytes: int = 0

    def make_proposer(
        self, attention: AttentionBackend, storage: KVStorage, target: CausalLM, *, repeatable: bool
    ) -> Proposer:
        """`repeatable`: requests without a seed of their own must come out the same every time, too."""
        if self.network is None:
            return NgramProposer()
        for layer in self.layers:  # what is read before it is written must at least be numbers
            storage.keys[layer.index].zero_()
            storage.values[layer.index].zero_()
        return NetworkProposer(self.name, self.network, attention, storage, target, draws=not repeatable)


def load_draft(speculate: str, target: CausalLM, tokenizer: Tokenizer, max_model_len: int) -> Draft:
    wanted = Speculate.parse(speculate)
    if wanted.kind == "ngram":
        return Draft(speculate)
    if wanted.kind == "layers":
        model = _decoder(target, speculate)
        if wanted.layers >= len(model.layers):
            raise InvalidParameter("speculate", f"{speculate!r}: the model has {len(model.layers)} layers; use fewer")
        return Draft(speculate, FirstLayers(model, wanted.layers))
    checkpoint = open_checkpoint(shipped_draft(wanted.path) or resolve_model(wanted.path, progress=False))
    with torch.inference_mode():
        if is_head(checkpoint.config):
            config, model = HeadConfig.of(checkpoint.config), _decoder(target, speculate)
            head = DraftHead(config, model, checkpoint.tensors(), index=len(model.attention_layers))
            return Draft(speculate, Head(head), head.attention_layers, head.num_weight_bytes())
        return _small_model(speculate, checkpoint, target, tokenizer, max_model_len)


def _small_model(
    speculate: str, checkpoint: Checkpoint, target: CausalLM, tokenizer: Tokenizer, max_model_len: int
) -> Draft:
    own = make_tokenizer(checkpoint)
    if own.encode(_PROBE) != tokenizer.encode(_PROBE):
        raise InvalidParameter("speculate", f"{speculate!r}: that model splits text into other tokens than this one")
    built = build_model(checkpoint.config, checkpoint.tensors(), dtype=target.dtype, device=target.device)
    model = _decoder(built, speculate)
    if model.vocab_size > target.vocab_size:
        raise InvalidParameter("speculate", f"{speculate!r}: that model has more tokens than this one")
    if model.max_len < max_model_len:
        problem = f"takes {model.max_len} tokens, less than max_model_len ({max_model_len})"
        raise InvalidParameter("speculate", f"{speculate!r}: that model {problem}")
    first = len(target.attention_layers)
    for layer in model.layers:
        attention = layer.attention
        attention.layer = replace(attention.layer, index=first + attention.layer.index)
    layers = tuple(layer.attention.layer for layer in model.layers)
    return Draft(speculate, SmallModel(model), layers, model.num_weight_bytes())


def _decoder(model: CausalLM, speculate: str) -> Decoder:
    if not isinstance(model, Decoder):
        raise InvalidParameter("speculate", f"{speculate!r}: only ngram works with models that transformers runs")
    return model


def shipped_draft(name: str) -> Path | None:
    """A draft head that comes with the package, by the name of its model; None if there is none of that name."""
    if not name or Path(name).exists() or "/" in name:
        return None
    folder = Path(str(resources.files("chairlift.speculation"))) / "pretrained" / name
    return folder if folder.is_dir() else None
