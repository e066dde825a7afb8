"""Models that bring threads of their own, beside torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from chairlift.attention.backends.base import AttentionBackend
from chairlift.models.base import CausalLM


@contextmanager
def few_threads(model: CausalLM, attention: AttentionBackend) -> Iterator[None]:
    """A model that brings its own threads (for the attention that it is made for) needs the cores for itself: torch's
    would go on spinning after each of the small operations that are left to it."""
    if not getattr(model, "brings_threads", False) or not attention.capabilities.host_attend:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
