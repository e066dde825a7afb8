"""A small random model whose next token depends on every earlier token, so that a wrong key changes its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from chairlift.engine.startup import LoadedModel
from chairlift.errors import InvalidParameter
from chairlift.models import build_model
from chairlift.models.dummy import SPREAD, dummy_tensors
from chairlift.text.tokenizer import Tokenizer

END = 256  # the token after those of the 256 bytes
SHAPE: dict[str, Any] = {
    "vocab_size": 272,  # more than the tokenizer has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
}


def stress_model(
    family: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    quantization: str = "none",
    batch_invariant: bool = False,
) -> LoadedModel:
    if family not in FAMILIES:
        raise InvalidParameter("family", f"unknown {family!r}; choose from {', '.join(FAMILIES)}")
    config = SHAPE | {"model_type": family} | FAMILIES[family]
    with torch.inference_mode():
        tensors = decisive_tensors(config, device)
        options: dict[str, Any] = {"quantization": quantization, "batch_invariant": batch_invariant}
        model = build_model(config, tensors, dtype=dtype, device=device, **options)
    return LoadedModel(f"a random {family}", model, byte_tokenizer(), frozenset({END}))


def decisive_tensors(config: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Weights scaled so that activations keep their size; default random weights hardly change their input."""
    for name, values in dummy_tensors(config, device):
        yield name, values if values.dim() == 1 else values.float() * (1.2 * values.shape[-1] ** -0.5 / SPREAD)


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one for the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)
