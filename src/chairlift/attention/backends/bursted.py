"""Bursted attention: one call per request, written as the formula. Slow; the reference for all other backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend, Capabilities
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention, visible_mask
from chairlift.attention.sparse import choose_positions
from chairlift.attention.storage import KVStorage


@BACKENDS.register("bursted")
class BurstedAttention(AttentionBackend):
    name = "bursted"
    capabilities = Capabilities(sinks=True, chunks=True, several_tables=True, chooses=True)
    preference = 1

    def begin(self, batch: StepBatch, storage: KVStorage) -> StepAttention:
        return _BurstedStep(batch.layout, storage)


@dataclass(frozen=True, slots=True)
class _BurstedStep(StepAttention):
    layout: RaggedLayout
    storage: KVStorage

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        return self._attend(layer, q, k, v, sinks)

    def choose(self, layer: AttentionLayer, q: Tensor, k: Tensor, weights: Tensor) -> Tensor | None:
        return choose_positions(layer, self.layout, self.storage, q, k, weights)

    def attend_to_chosen(self, layer: AttentionLayer, q: Tensor, latent: Tensor, chosen: Tensor) -> Tensor:
        """All positions are read, and a mask hides those that are not chosen."""
        return self._attend(layer, q, latent, latent, chosen=chosen)

    def _attend(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        layout, where = self.layout, self.layout.of_table(self.storage.place(layer.index)[1])
        self.storage.write(layer.index, where.slot_mapping, k, v)
        out = q.new_empty(*q.shape[:2], layer.value_dim)
        for i, (start, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
            rows = slice(layout.offsets[i], layout.offsets[i + 1])
            keys, values = self.storage.read(layer.index, where.tables[i], end, q.dtype)
            mask = visible_mask(layer, start, end, q.device)
            if chosen is not None:
                mask = mask & (chosen[rows, :, None] == torch.arange(end, device=q.device)).any(dim=1)
            out[rows] = attention_by_formula(layer, q[rows], keys, values[..., : layer.value_dim], mask, sinks)
        return out


def attention_by_formula(
    layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q·kᵀ·scale, masked)·v in float32, for one sequence, or for several on leading axes.

    q [c, heads, d]; keys [n, kv_heads, d]; values [n, kv_heads, value_dim]; mask [c, n]; sinks [heads]
    -> [c, heads, value_dim] in q's type.
    """
    group = layer.num_heads // layer.num_kv_heads
    query = q.float().transpose(-3, -2).unflatten(-3, (layer.num_kv_heads, group))  # [kv_heads, group, c, d]
    key, value = (side.float().transpose(-3, -2).unsqueeze(-3) for side in (keys, values))  # [kv_heads, 1, n, d]
    scores = query @ key.mT * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~mask[..., None, None, :, :], float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:  # one more score per row, whose weight is dropped
        extra = sinks.float().view(layer.num_kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    attended: Tensor = (weights @ value).flatten(-4, -3).transpose(-3, -2)
    return attended.to(q.dtype)
