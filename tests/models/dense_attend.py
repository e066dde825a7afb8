"""Reference attention: per sequence, dense, in float64, over plain lists of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chairlift.attention.interface import AttentionLayer, StepAttention


@dataclass
class DenseCache:
    """Keeps every key and value of every sequence, so that a prompt can be fed in pieces."""

    stored: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, pieces: Sequence[tuple[str, int]]) -> StepAttention:
        """The attention of one ragged batch: (sequence, number of its tokens), in the order of the rows."""
        return _DenseStep(self, pieces, {key: len(keys) for key, (keys, _) in self.stored.items()})

    def _store(self, key: tuple[int, str], length: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the first `length` keys and values and put the new ones behind them."""
        if length:
            k, v = torch.cat((self.stored[key][0][:length], k)), torch.cat((self.stored[key][1][:length], v))
        self.stored[key] = (k.clone(), v.clone())
        return self.stored[key]


@dataclass
class _DenseStep(StepAttention):
    cache: DenseCache
    pieces: Sequence[tuple[str, int]]
    lengths: dict[tuple[int, str], int]  # before the step

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        assert (sinks is not None) == layer.sinks
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        assert k.shape[1:] == (layer.num_kv_heads, layer.head_dim)
        assert v.shape[1:] == (layer.num_kv_heads, layer.value_dim)
        counts = [count for _, count in self.pieces]
        outputs = []
        for (name, _), rows_q, rows_k, rows_v in zip(
            self.pieces, q.split(counts), k.split(counts), v.split(counts), strict=True
        ):
            key = (layer.index, name)
            keys, values = self.cache._store(key, self.lengths.get(key, 0), rows_k, rows_v)
            outputs.append(dense_attention(layer, rows_q, keys, values, sinks))
        return torch.cat(outputs)


def dense_attention(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention of the last len(q) tokens of a sequence over its len(k) tokens."""
    groups = layer.num_heads // layer.num_kv_heads
    keys = k.double().repeat_interleave(groups, dim=1)
    values = v.double().repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    row = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    column = torch.arange(len(k), device=q.device)[None, :]
    visible = column <= row
    if layer.window is not None:
        visible &= column > row - layer.window
    if layer.chunk is not None:
        visible &= column // layer.chunk == row // layer.chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
