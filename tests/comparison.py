"""Comparison of our greedy tokens with those of transformers, allowing only ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TIE = 1e-4


def reference_tokens(hf_model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by transformers' own generate, end-of-sequence ignored."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)], device=hf_model.device)
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
    """Return None if equal, or a note if they differ first at a tie within 1e-4; fails otherwise."""
    place = first_difference(expected, actual)
    if place is None:
        return None
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *expected[:place]]], device=hf_model.device)
        logits = hf_model(ids).logits[0, -1].double()
    gap = float(logits[expected[place]] - logits[actual[place]])
    assert abs(gap) <= TIE, (
        f"prompt of {len(prompt)}: token {place} is {actual[place]}, transformers has {expected[place]} (gap {gap:.2e})"
    )
    return f"prompt of {len(prompt)} tokens: tie at token {place} (gap {gap:.1e})"


def check_greedy(hf_model: Any, prompt: Sequence[int], actual: Sequence[int]) -> list[str]:
    """Check that each token is the one that transformers chooses after the preceding tokens, or ties within 1e-4;
    return notes on ties. This is equivalent to comparing with the output of transformers, but needs one forward pass
    instead of one per token."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *actual[:-1]]], device=hf_model.device)
        logits = hf_model(ids, logits_to_keep=len(actual)).logits[0].double()
    notes = []
    for place, (token, scores) in enumerate(zip(actual, logits, strict=True)):
        best = int(scores.argmax())
        gap = float(scores[best] - scores[token])
        assert gap <= TIE, f"prompt of {len(prompt)}: token {place} is {token}, transformers has {best} (gap {gap:.2e})"
        if token != best:
            notes.append(f"prompt of {len(prompt)} tokens: tie at token {place} (gap {gap:.1e})")
    return notes
