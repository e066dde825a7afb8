"""Padded attention: the classic batch. One dense call for all requests, as wide as the longest of them.

Every request's keys and values are gathered into one [B, longest sequence] tensor, and every request has as many query
rows as the longest chunk; masks hide the padding. It is the baseline that shows what a ragged batch saves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend, Capabilities
from chairlift.attention.backends.bursted import attention_by_formula
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention, visible_positions
from chairlift.attention.sparse import attend_to_chosen, choose_positions
from chairlift.attention.storage import KVStorage, as_plain, widened


@BACKENDS.register("padded")
class PaddedAttention(AttentionBackend):
    name = "padded"
    capabilities = Capabilities(rectangular=True, sinks=True, chunks=True, several_tables=True, chooses=True)

    def begin(self, batch: StepBatch, storage: KVStorage) -> StepAttention:
        layout = batch.layout
        return _PaddedStep(layout, storage, _Rectangle.of(layout, storage.block_size))


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """B sequences with `width` queries each, over L positions: the longest sequence, in whole blocks."""

    width: int
    num_blocks: int  # blocks of the longest sequence
    absent: Tensor  # [B, L] bool: positions that a sequence does not have
    queries: Tensor  # [B, width] int64: the last position that each query may see

    @classmethod
    def of(cls, layout: RaggedLayout, block_size: int) -> _Rectangle:
        device = layout.tables.device
        width = layout.offsets[1]
        assert layout.offsets[-1] == width * len(layout.starts), "the batch is not a rectangle"
        starts = torch.tensor(layout.starts, device=device)[:, None]
        ends = torch.tensor(layout.ends, device=device)[:, None]
        num_blocks = -(-max(layout.ends) // block_size)
        positions = torch.arange(num_blocks * block_size, device=device)
        # Padding sees what its sequence's last token sees: a softmax over nothing would be NaN.
        queries = torch.minimum(starts + torch.arange(width, device=device), ends - 1)
        return cls(width, num_blocks, positions >= ends, queries)

    def visible(self, layer: AttentionLayer) -> Tensor:
        """[B, width, L] bool: which positions each query may see."""
        last = self.queries[:, :, None]
        return visible_positions(layer, torch.arange(self.absent.shape[1], device=last.device), last)


@dataclass(frozen=True, slots=True)
class _PaddedStep(StepAttention):
    layout: RaggedLayout
    storage: KVStorage
    rectangle: _Rectangle
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)  # The keys are (window, chunk).

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        where = self.layout.of_table(self.storage.place(layer.index)[1])
        self.storage.write(layer.index, where.slot_mapping, k, v)
        blocks = where.tables[:, : self.rectangle.num_blocks].flatten()
        keys = self._gather(self.storage.keys[layer.index], blocks, q.dtype)
        values = self._gather(self.storage.values[layer.index], blocks, q.dtype)[..., : layer.value_dim]
        query = q.unflatten(0, (-1, self.rectangle.width))  # [B, width, heads, d]
        mask = self._mask(layer)
        if layer.softcap is not None or sinks is not None:
            return attention_by_formula(layer, query, keys, values, mask, sinks).flatten(0, 1)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask[:, None],
            scale=layer.scale,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )
        return attended.transpose(1, 2).flatten(0, 1)

    def choose(self, layer: AttentionLayer, q: Tensor, k: Tensor, weights: Tensor) -> Tensor | None:
        return choose_positions(layer, self.layout, self.storage, q, k, weights)

    def attend_to_chosen(self, layer: AttentionLayer, q: Tensor, latent: Tensor, chosen: Tensor) -> Tensor:
        return attend_to_chosen(layer, self.layout, self.storage, q, latent, chosen)

    def _mask(self, layer: AttentionLayer) -> Tensor:
        key = (layer.window, layer.chunk)
        if key not in self.masks:
            self.masks[key] = self.rectangle.visible(layer)
        return self.masks[key]

    def _gather(self, stored: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """[num_blocks, block_size, kv_heads, d] -> [B, L, kv_heads, d], with zeros behind a sequence's end, where
        the memory may hold NaN, which no mask hides."""
        rectangle = self.rectangle
        gathered = as_plain(stored).index_select(0, blocks).view(stored.dtype)
        dense = widened(gathered.view(*rectangle.absent.shape, *stored.shape[2:]), dtype)
        return dense.masked_fill_(rectangle.absent[:, :, None, None], 0.0)
