"""An attention backend: gather each sequence from the cache and call torch's dense attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention, visible_mask
from chairlift.attention.storage import KVStorage


@BACKENDS.register("dense")
class DenseAttention(AttentionBackend):
    name = "dense"

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        return ["it has no soft-cap"] if any(layer.softcap is not None for layer in layers) else []

    def begin(self, batch: StepBatch, storage: KVStorage) -> StepAttention:
        return DenseStep(batch.layout, storage)


@dataclass
class DenseStep(StepAttention):
    layout: RaggedLayout
    storage: KVStorage

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        layout, storage = self.layout, self.storage
        storage.write(layer.index, layout.slot_mapping, k, v)
        out = q.new_empty(*q.shape[:2], layer.value_dim)
        for i, (start, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
            rows = slice(layout.offsets[i], layout.offsets[i + 1])
            keys, values = storage.read(layer.index, layout.tables[i], end, q.dtype)
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values[..., : layer.value_dim].transpose(0, 1)[None],  # Latent layers keep values in their keys.
                attn_mask=visible_mask(layer, start, end, q.device),
                scale=layer.scale,
                enable_gqa=True,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out
