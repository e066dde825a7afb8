"""Tokens that see each other: those of an image in models whose attention is not causal inside of it.

What such rows may see is more than what the others may, so that they are computed by the formula, behind the backend
that computes all rows as causal ones and stores all keys and values. So every backend has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.backends.bursted import attention_by_formula
from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.storage import KVStorage


@dataclass(frozen=True, slots=True)
class MutualAttention(StepAttention):
    """The attention of a backend, with some rows that also see tokens behind them."""

    causal: StepAttention
    batch: StepBatch
    storage: KVStorage
    in_windows_only: bool = False  # layers without a window stay causal

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        if self.in_windows_only and layer.window is None:
            return self.causal.attend(layer, q, k, v, sinks=sinks)
        out = self.causal.attend(layer, q.clone(), k, v, sinks=sinks)
        layout = self.batch.layout
        for span in self.batch.mutual:
            first = layout.offsets[span.sequence] - layout.starts[span.sequence]
            rows = slice(first + span.start, first + span.end)
            end = max(span.reach, span.end)
            keys, values = self.storage.read(layer.index, layout.tables[span.sequence], end, q.dtype)
            positions = torch.arange(end, device=q.device)
            mask = (positions < span.reach).expand(span.end - span.start, -1)
            if layer.window is not None:
                queries = torch.arange(span.start, span.end, device=q.device)[:, None]
                mask = mask & (positions > queries - layer.window)
            out[rows] = attention_by_formula(layer, q[rows], keys, values[..., : layer.value_dim], mask, sinks)
        return out
