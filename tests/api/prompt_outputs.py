"""Prompt outputs of transformers, and comparisons with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from chairlift.core.sampling.params import Pooling, PoolingKind, SamplingParams

SCORED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)


def expected_logprobs(hf: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([list(tokens)])).logits[0].float().log_softmax(dim=-1)


def expected_embedding(hf: Any, tokens: Sequence[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        hidden = hf.model(torch.tensor([list(tokens)])).last_hidden_state[0]
    return hidden.mean(dim=0) if pooling == "mean" else hidden[-1]


def pooled(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=Pooling(PoolingKind(kind), **more))


def check_embedding(hf: Any, tokens: list[int], found: list[float], pooling: str) -> None:
    expected = expected_embedding(hf, tokens, pooling)
    vector = torch.tensor(found)
    assert abs(float(vector.norm()) - 1) < 1e-5
    assert float(torch.nn.functional.cosine_similarity(vector, expected, dim=0)) > 0.9999
