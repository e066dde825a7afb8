"""Ragged paged attention on the CPU.

Decodes are many and short: all of them go through one compiled kernel that reads the blocks in place. Prefill chunks
are few and long: each gathers its keys and values once and uses torch's tiled (FlashAttention-style) kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.base import Attend, AttentionLayer, KVStorage, RaggedLayout, visible_mask
from chairlift.attention.bursted import attention_by_formula

SHORT_CHUNK = 8  # up to this many tokens, reading the blocks again for each beats gathering them


class PagedCPUAttention:
    name = "ragged"
    rectangular = False

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        found = []
        if device.type != "cpu":
            found.append(f"it runs on the CPU, not on {device.type}")
        if dtype is not torch.float32:
            found.append(f"it takes float32, not {dtype}")
        if importlib.util.find_spec("numba") is None:
            found.append("numba is not installed")
        return found

    def plan(self, layout: RaggedLayout, storage: KVStorage) -> Attend:
        return _PagedStep(layout, storage, _ShortRows.of(layout), _long_chunks(layout))


@dataclass(frozen=True, slots=True)
class _ShortRows:
    """Every row of the short chunks, by itself. All [R] int64."""

    rows: np.ndarray
    sequences: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, layout: RaggedLayout) -> _ShortRows:
        offsets, ends = np.asarray(layout.offsets), np.asarray(layout.ends)
        counts = np.diff(offsets)
        short = np.flatnonzero(counts <= SHORT_CHUNK)
        sequences = np.repeat(short, counts[short])
        rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in short]) if short.size else short
        # The last row of a chunk sees the whole sequence, the one before it one position less.
        lengths = ends[sequences] - (offsets[sequences + 1] - 1 - rows)
        return cls(rows, sequences, lengths)


def _long_chunks(layout: RaggedLayout) -> list[int]:
    counts = np.diff(np.asarray(layout.offsets))
    return [int(i) for i in np.flatnonzero(counts > SHORT_CHUNK)]


@dataclass(frozen=True, slots=True)
class _PagedStep:
    layout: RaggedLayout
    storage: KVStorage
    short: _ShortRows
    long: list[int]

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.storage.write(layer.index, self.layout.slots, k, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.short.rows.size:
            self._attend_short(layer, q, out)
        for i in self.long:
            self._attend_long(layer, i, q, k, v, out)
        return out

    def _attend_short(self, layer: AttentionLayer, q: Tensor, out: Tensor) -> None:
        from chairlift.kernels.paged_cpu import attend_rows  # compiled on first use

        attend_rows(
            q.contiguous().numpy(),  # a slice of the fused projection would keep the loops from vectorising
            self.storage.keys[layer.index].numpy(),
            self.storage.values[layer.index].numpy(),
            self.layout.tables.numpy(),
            self.short.rows,
            self.short.sequences,
            self.short.lengths,
            np.float32(layer.scale),
            layer.window or 0,
            np.float32(layer.softcap or 0.0),
            out.numpy(),
        )

    def _attend_long(self, layer: AttentionLayer, i: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        layout = self.layout
        start, end = layout.starts[i], layout.ends[i]
        rows = slice(layout.offsets[i], layout.offsets[i + 1])
        if start == 0:
            keys, values = k[rows], v[rows]
        else:
            keys, values = self.storage.read(layer.index, layout.tables[i], end)
        windowed = layer.window is not None and end > layer.window
        if layer.softcap is not None:
            mask = visible_mask(start, end, layer.window, q.device)
            out[rows] = attention_by_formula(layer, q[rows], keys, values, mask)
            return
        causal_only = start == 0 and not windowed
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=None if causal_only else visible_mask(start, end, layer.window, q.device),
            is_causal=causal_only,
            scale=layer.scale,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )
        out[rows] = attended[0].transpose(0, 1)
