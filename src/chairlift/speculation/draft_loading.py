"""Loads what `draft:PATH` names: a draft head or a draft model."""

from __future__ import annotations

from functools import partial
from importlib import resources
from pathlib import Path

import torch

from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.resolve import resolve_model
from chairlift.models.base import CausalLM
from chairlift.speculation.draft_head import HeadNetwork
from chairlift.speculation.draft_model import load_draft_model
from chairlift.speculation.draft_network import require_decoder
from chairlift.speculation.draft_proposer import DraftModelProposer
from chairlift.speculation.head_config import HeadConfig, is_head
from chairlift.speculation.head_layers import DraftHead
from chairlift.speculation.proposers.base import LoadedProposer
from chairlift.text.tokenizer import Tokenizer


def load_draft(path: str, target: CausalLM, tokenizer: Tokenizer, max_model_len: int) -> LoadedProposer:
    speculate = f"draft:{path}"
    checkpoint = open_checkpoint(shipped_draft(path) or resolve_model(path, progress=False))
    with torch.inference_mode():
        if not is_head(checkpoint.config):
            return load_draft_model(speculate, checkpoint, target, tokenizer, max_model_len)
        config, model = HeadConfig.of(checkpoint.config), require_decoder(target, speculate)
        head = DraftHead(config, model, checkpoint.tensors(), index=len(model.attention_layers))
        make = partial(DraftModelProposer, speculate, HeadNetwork(head), layers=head.attention_layers)
        return LoadedProposer(make, head.attention_layers, head.num_weight_bytes())


def shipped_draft(name: str) -> Path | None:
    """The folder of a draft head that comes with the package, by its model's name; None if there is none."""
    if not name or Path(name).exists() or "/" in name:
        return None
    folder = Path(str(resources.files("chairlift.speculation"))) / "pretrained" / name
    return folder if folder.is_dir() else None
