"""Tiny random checkpoints made with transformers, and helpers that run a model on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from tests.models.dense_attend import DenseCache
from tests.models.slot_states import SlotStates

CPU = torch.device("cpu")
VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_reference(config: Any) -> Any:
    """A transformers model with seeded weights, without norms of one and biases of zero, which could hide bugs.

    Biases and tied embeddings are small: large ones would make the model repeat one token whatever the layers compute.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.05 if name.endswith("bias") else 0.3))
            else:
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
        if tied:
            model.get_input_embeddings().weight.mul_(0.25)
    return model


def save(model: Any, folder: Path) -> dict[str, Any]:
    """Write the checkpoint as published ones look; return its config.json."""
    model.save_pretrained(folder)
    return read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def stream(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


@torch.inference_mode()
def load(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> CausalLM:
    config = read_config(folder) if config is None else config
    options = {"dtype": torch.float32, "device": CPU} | options
    return build_model(config, stream(folder), **options)


def prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def reference_logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens[None]).logits[0]
    return logits.float()


@torch.inference_mode()
def run_alone(model: CausalLM, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
    """Run one sequence; return the logits of `rows`, or of all rows."""
    pieces = [("only", len(tokens))]
    states = SlotStates(model.recurrent_layers).step(pieces)
    batch = StepBatch(tokens, torch.arange(len(tokens)), recurrent=states)
    return model.logits(model.hidden_states(batch, DenseCache().step(pieces), rows).last)


@torch.inference_mode()
def run_ragged(model: CausalLM, sequences: list[Tensor]) -> list[Tensor]:
    """Run all sequences in one batch."""
    counts = [len(tokens) for tokens in sequences]
    pieces = [(str(i), count) for i, count in enumerate(counts)]
    attend, states = DenseCache().step(pieces), SlotStates(model.recurrent_layers).step(pieces)
    positions = torch.cat([torch.arange(count) for count in counts])
    logits = model.logits(
        model.hidden_states(StepBatch(torch.cat(sequences), positions, recurrent=states), attend).last
    )
    return list(logits.split(counts))


@torch.inference_mode()
def run_chunked(model: CausalLM, sequences: list[Tensor], chunk: int) -> list[Tensor]:
    """Run all sequences in steps of at most `chunk` tokens of each."""
    cache, states = DenseCache(), SlotStates(model.recurrent_layers)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for start in range(0, max(len(tokens) for tokens in sequences), chunk):
        pieces = {i: tokens[start : start + chunk] for i, tokens in enumerate(sequences) if len(tokens) > start}
        positions = torch.cat([torch.arange(start, start + len(piece)) for piece in pieces.values()])
        counts = [len(piece) for piece in pieces.values()]
        named = [(str(i), count) for i, count in zip(pieces, counts, strict=True)]
        tokens = torch.cat(list(pieces.values()))
        batch = StepBatch(tokens, positions, recurrent=states.step(named))
        hidden = model.hidden_states(batch, cache.step(named)).last
        for i, part in zip(pieces, model.logits(hidden).split(counts), strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def assert_matches(model: CausalLM, reference: Any, *lengths: int, tolerance: float = 1e-4) -> None:
    """Check the logits against transformers: alone, in one ragged batch, chunked, and for selected rows only."""
    sequences = prompts(*lengths)
    expected = [reference_logits(reference, tokens) for tokens in sequences]
    assert expected[0].std() > 0.1, "a model with flat logits would not show a bug"
    alone = [run_alone(model, tokens) for tokens in sequences]
    for actual in (alone, run_ragged(model, sequences), run_chunked(model, sequences, 5)):
        for logits, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(logits, wanted, atol=tolerance, rtol=0)
    for rows in (torch.tensor([lengths[0] - 1, 0]), torch.tensor([], dtype=torch.int64)):
        some = run_alone(model, sequences[0], rows)
        torch.testing.assert_close(some, expected[0][rows], atol=tolerance, rtol=0)
