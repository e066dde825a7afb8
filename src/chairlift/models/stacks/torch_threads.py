"""Leaving the cores to a stack that has threads of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chairlift.attention.backends.base import AttentionBackend
from chairlift.models.base import CausalLM


@contextmanager
def limit_torch_threads(model: CausalLM, attention: AttentionBackend) -> Iterator[None]:
    """Reduce torch to one thread while a stack runs on its own: torch's threads spin after each small operation."""
    if not (model.has_own_threads and attention.capabilities.has_work):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
