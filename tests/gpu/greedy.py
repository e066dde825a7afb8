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
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.text.tokenizer import Tokenizer
from tests.api.conftest import Run, run_greedy
from tests.comparison import compare
from tests.models.checkpoints import load
from tests.tiny import byte_level_tokenizer

NUM_STATES = 64  # of recurrent layers: more than the requests of a test need


def load_tiny(folder: Path, device: torch.device, dtype: torch.dtype, **options: Any) -> LoadedModel:
    model = load(folder, device=device, dtype=dtype, **options)
    return LoadedModel(folder.name, model, Tokenizer(byte_level_tokenizer()), frozenset())


def generate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> Run:
    """Generate greedily on a new engine; the option `num_blocks` sets `kv_memory` to this number of blocks, beside the
    states of recurrent layers."""
    model = loaded.model
    block_size = options.get("block_size", 16)
    per_token = bytes_per_token(model.attention_layers, model.dtype)
    states = NUM_STATES * sum(layer.num_bytes for layer in model.recurrent_layers)
    memory = options.pop("num_blocks", 400) * block_size * per_token + states
    options |= {"state_memory": states} if states else {}
    dtype = str(model.dtype).removeprefix("torch.")
    config = EngineConfig(device=model.device.type, dtype=dtype, kv_memory=memory, **options)
    return run_greedy(start_engine(loaded, config).engine, prompts, count)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Comparison of 16-bit tokens with those that transformers chooses after the same tokens.

    Both round after every operation, each in different places. `noise` is the largest effect of that on a score in
    transformers: its scores in the 16-bit type against those of the same weights in float32.
    """

    tokens: int
    different: int  # tokens that differ from those of transformers in the 16-bit type
    theirs_different: int  # tokens of transformers that differ between the 16-bit type and float32
    largest_gap: float  # largest float32 score difference between the best token and ours
    noise: float

    @property
    def all_near_ties(self) -> bool:
        """Whether rounding explains all differences: scores further apart than twice the noise cannot swap."""
        return self.largest_gap <= 2 * self.noise


def compare_rounded(hf: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Rounding:
    """Compare our `outputs` with `hf`, which computes in the 16-bit type."""
    exact = torch.nn.Module.float(copy.deepcopy(hf))  # the method of transformers refuses models from GGUF files
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
    """Scores [len(output), vocabulary] at the positions of `output`."""
    ids = torch.tensor([[*prompt, *output[:-1]]], device=hf.device)
    scores: Tensor = hf(ids, logits_to_keep=len(output)).logits[0].double()
    return scores


def count_ties(
    hf: Any,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> int:
    """Return the number of outputs that differ at a tie within 1e-4; fails for any other difference."""
    return sum(
        compare(hf, prompt, expected_tokens[: len(output)], output) is not None
        for prompt, expected_tokens, output in zip(prompts, expected, outputs, strict=True)
    )


def rounding_row(name: str, found: Rounding) -> dict[str, Any]:
    return {
        "model": name,
        "tokens": found.tokens,
        "differ": found.different,
        "transformers from its float32": found.theirs_different,
        "largest gap": f"{found.largest_gap:.4f}",
        "rounding of a score": f"{found.noise:.4f}",
    }
