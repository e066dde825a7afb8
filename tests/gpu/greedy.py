"""Greedy tokens of the engine against transformers on the same device, exactly and within rounding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chairlift.config import EngineConfig
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.text.tokenizer import Tokenizer
from tests.api.conftest import Run, run_greedy
from tests.models.checkpoints import load
from tests.tiny import byte_level_tokenizer


def load_tiny(folder: Path, device: torch.device, dtype: torch.dtype, **options: Any) -> LoadedModel:
    model = load(folder, device=device, dtype=dtype, **options)
    return LoadedModel(folder.name, model, Tokenizer(byte_level_tokenizer()), frozenset())


def generate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> Run:
    """`num_blocks` in terms of `kv_memory`, which is what an engine is told."""
    model = loaded.model
    block_size = options.get("block_size", 16)
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in model.attention_layers) * model.dtype.itemsize
    memory = options.pop("num_blocks", 400) * block_size * per_token
    dtype = str(model.dtype).removeprefix("torch.")
    config = EngineConfig(device=model.device.type, dtype=dtype, kv_memory=memory, **options)
    return run_greedy(start_engine(loaded, config).engine, prompts, count)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How tokens in a short type compare with those that transformers chooses after the same tokens.

    Both round after every operation, each in its own places. `noise` is what that does to a score in transformers at
    most: its scores in the short type against those of the same weights in float32.
    """

    tokens: int
    different: int  # from the likeliest by transformers in the short type
    theirs_different: int  # of transformers in the short type from itself in float32
    largest_gap: float  # by which a token of ours falls behind the likeliest in float32
    noise: float

    @property
    def all_near_ties(self) -> bool:
        """Two scores that differ by more than twice the noise cannot change places by rounding."""
        return self.largest_gap <= 2 * self.noise


def compare_rounded(hf: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Rounding:
    """`hf` computes in the short type; `outputs` are ours."""
    exact = torch.nn.Module.float(copy.deepcopy(hf))  # transformers' own refuses what came from a GGUF file
    tokens = different = theirs_different = 0
    largest_gap = noise = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        scores, right = (_scores(model, prompt, output) for model in (hf, exact))
        ours = torch.tensor(list(output), device=right.device)
        tokens += len(ours)
        different += int((scores.argmax(-1) != ours).sum())
        theirs_different += int((scores.argmax(-1) != right.argmax(-1)).sum())
        noise = max(noise, float((scores - right).abs().max()))
        gaps = right.max(-1).values - right.gather(-1, ours[:, None])[:, 0]
        largest_gap = max(largest_gap, float(gaps.max()))
    return Rounding(tokens, different, theirs_different, largest_gap, noise)


@torch.inference_mode()
def _scores(hf: Any, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """[len(output), vocabulary]: of the tokens in the places of `output`."""
    ids = torch.tensor([[*prompt, *output[:-1]]], device=hf.device)
    scores: Tensor = hf(ids, logits_to_keep=len(output)).logits[0].double()
    return scores
