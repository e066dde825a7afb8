"""Greedy tokens of ours against those of transformers, with honest treatment of ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TIE = 1e-4


def reference_tokens(hf_model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by transformers' own generate, end-of-sequence ignored."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        out = hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    assert len(expected) == len(actual), f"{len(actual)} tokens instead of {len(expected)}"
    return next((i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b), None)


def compare(hf_model: Any, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]) -> str | None:
    """None if equal; a note if they part at a tie within 1e-4; fails otherwise."""
    place = first_difference(expected, actual)
    if place is None:
        return None
    with torch.inference_mode():
        logits = hf_model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1].double()
    gap = float(logits[expected[place]] - logits[actual[place]])
    assert abs(gap) <= TIE, (
        f"prompt of {len(prompt)}: token {place} is {actual[place]}, transformers has {expected[place]} (gap {gap:.2e})"
    )
    return f"prompt of {len(prompt)} tokens: tie at token {place} (gap {gap:.1e})"
