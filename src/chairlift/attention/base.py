"""The one interface between a model and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer's attention looks like; everything that may differ between the layers of a model."""

    index: int  # which layer of the KV storage it reads and writes
    num_heads: int
    num_kv_heads: int  # == num_heads: MHA; 1: MQA; in between: GQA
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


class Attend(Protocol):
    """The attention of one step, handed to the model as an argument.

    It stores the new keys and values in the cache and returns, for every token of the ragged batch, the
    attention over its own sequence. T tokens of many sequences are concatenated on the first axis.
    """

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim]; k, v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        ...
