"""Ragged attention on the CPU: one compiled kernel for decodes and prefill chunks that reads the blocks in place.

It imports numba, which takes a while: `backends/ragged.py` imports it only for a CPU that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend, Capabilities
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, HostWork, LatentProjection, StepAttention, UpProjection
from chairlift.attention.sparse import attend_to_chosen, choose_positions
from chairlift.attention.storage import KVStorage
from chairlift.kernels.cpu.attention import Cache, Score
from chairlift.kernels.cpu.attention_work import (
    FEW,
    FEW_PIECES,
    PIECE,
    AttentionWork,
    share_pieces,
    split_work,
    work_by_rows,
)
from chairlift.kernels.cpu.decoder import attend_layer
from chairlift.kernels.cpu.threads import the_team


class PagedCPUAttention(AttentionBackend):
    name = "ragged"
    capabilities = Capabilities(
        batch_invariant=True, has_work=True, sinks=True, chunks=True, chooses=True, several_tables=True
    )

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append(f"it runs on the CPU, not on {device.type}")
        if dtype is not torch.float32:
            reasons.append(f"it takes float32, not {dtype}")
        return reasons

    def begin(self, batch: StepBatch, storage: KVStorage) -> StepAttention:
        return PagedCPUStep(batch.layout, storage, self.invariant_for is not None)


@dataclass(slots=True)
class PagedCPUStep(StepAttention):
    layout: RaggedLayout
    storage: KVStorage
    invariant: bool = False  # the form of a latent chunk does not depend on its length; all else never does
    _work: dict[tuple[int, int], AttentionWork] | None = None
    _by_form: tuple[LatentSplit, PagedCPUStep | None] | None = None  # the same for all layers

    def work(self, layer: AttentionLayer) -> HostWork:
        return HostWork(self._pieces(layer), self.layout, self.storage)

    def _pieces(self, layer: AttentionLayer) -> AttentionWork:
        """The step's attention split into pieces for threads: the same for all layers of one shape."""
        if self._work is None:
            self._work = {}
        shape = (layer.num_heads, layer.value_dim)
        if shape not in self._work:
            layout = self.layout
            singles = layout.offsets[-1] == len(layout.ends)  # a row of each sequence
            if singles and len(layout.ends) + sum(layout.ends) // PIECE <= FEW_PIECES:
                work = work_by_rows(range(len(layout.ends)), layout.ends, *shape)
            else:
                offsets, starts, ends = (np.asarray(x, np.int64) for x in (layout.offsets, layout.starts, layout.ends))
                work = split_work(offsets, starts, ends, *shape)
            self._work[shape] = share_pieces(work, layout.tables.numpy(), self.storage.block_size)
        return self._work[shape]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(*q.shape[:2], layer.value_dim, dtype=q.dtype)
        storage, where = self.storage, self.layout.of_table(self.storage.place(layer.index)[1])
        the_team().run(
            attend_layer,
            *(side.contiguous().numpy() for side in (q, k, v)),
            where.slot_mapping.numpy(),
            Cache(as_array(storage.keys[layer.index]), as_array(storage.values[layer.index]), where.tables.numpy()),
            self._pieces(layer),
            score_of(layer, sinks),
            out.numpy(),
        )
        return out

    def from_latent(self, layer: AttentionLayer, projection: LatentProjection) -> Tensor:
        if projection.chosen is not None:
            return super(PagedCPUStep, self).from_latent(layer, projection)
        q, latent = projection.ready()
        up = projection.up
        split, absorbing = self._split(layer, up)
        if not split.expanded:
            return up.values(self.attend_to_latents(layer, up, q, latent))
        out = q.new_empty(*q.shape[:2], up.weight.shape[1] - up.nope_dim)
        self.storage.write(layer.index, self.layout.slot_mapping, latent[:, None], latent[:, None])
        if absorbing is not None:
            rows = split.absorbed_rows
            out[rows] = up.values(absorbing.attend_to_latents(layer, up, q[rows], latent[rows]))
        for i in split.expanded:
            layout, own = self.layout, slice(self.layout.offsets[i], self.layout.offsets[i + 1])
            out[own] = attend_expanded(
                layer, up, q[own], self.storage, layout.tables[i], layout.starts[i], layout.ends[i]
            )
        return out

    def choose(self, layer: AttentionLayer, q: Tensor, k: Tensor, weights: Tensor) -> Tensor | None:
        return choose_positions(layer, self.layout, self.storage, q, k, weights, alone=self.invariant)

    def attend_to_chosen(self, layer: AttentionLayer, q: Tensor, latent: Tensor, chosen: Tensor) -> Tensor:
        return attend_to_chosen(layer, self.layout, self.storage, q, latent, chosen, alone=self.invariant)

    def _split(self, layer: AttentionLayer, up: UpProjection) -> tuple[LatentSplit, PagedCPUStep | None]:
        if self._by_form is None:
            # The form of a chunk depends on its length, which the rest of the batch decides.
            split = split_by_form(layer, up, self.layout, max(self.layout.ends) if self.invariant else FEW)
            part = None if split.absorbed is None else PagedCPUStep(split.absorbed, self.storage, self.invariant)
            self._by_form = split, part
        return self._by_form


def score_of(layer: AttentionLayer, sinks: Tensor | None) -> Score:
    """How the kernel computes the layer's scores."""
    return Score(
        np.float32(layer.scale),
        layer.window or 0,
        np.float32(layer.softcap or 0.0),
        layer.chunk or 0,
        np.empty(0, np.float32) if sinks is None else sinks.numpy(),
    )


def as_array(tensor: Tensor) -> np.ndarray:
    """The same memory for a compiled kernel; numpy has no bfloat16, so that goes as unsigned integers."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


EXPANDED_NUMBERS = 2**24  # keys and values that are in memory at a time: 64 MiB of float32


@dataclass(frozen=True, slots=True)
class LatentSplit:
    """The sequences of a step by the form in which they are computed."""

    absorbed: RaggedLayout | None  # their rows, one sequence behind the other; None if there are none
    absorbed_rows: Tensor  # [rows] int64: where these rows are in the batch
    expanded: tuple[int, ...]  # sequences


def split_by_form(layer: AttentionLayer, up: UpProjection, layout: RaggedLayout, few: int) -> LatentSplit:
    """Expand the sequences with more than `few` new tokens for which that takes fewer products."""
    spans = list(zip(layout.starts, layout.ends, strict=True))
    expanded = tuple(
        i for i, (start, end) in enumerate(spans) if end - start > few and _pays(layer, up, start, end - start)
    )
    absorbed = [i for i in range(len(spans)) if i not in expanded]
    rows = [torch.arange(layout.offsets[i], layout.offsets[i + 1]) for i in absorbed]
    if not absorbed:
        return LatentSplit(None, torch.empty(0, dtype=torch.int64), expanded)
    kept = torch.cat(rows)
    part = RaggedLayout(
        offsets=[0, *accumulate(len(each) for each in rows)],
        starts=[layout.starts[i] for i in absorbed],
        ends=[layout.ends[i] for i in absorbed],
        tables=layout.tables[absorbed],
        slot_mapping=layout.slot_mapping[kept],
    )
    return LatentSplit(part, kept, expanded)


def _pays(layer: AttentionLayer, up: UpProjection, start: int, count: int) -> bool:
    """Whether expanding a context of `start` tokens and `count` new ones takes fewer products than absorbing.

    For the new tokens themselves, expanding them takes as many products as absorbing their queries and sums.
    """
    assert layer.latent_dim is not None
    _, both, rank = up.weight.shape
    rope_dim = layer.head_dim - layer.latent_dim
    saved = layer.head_dim + rank - (both + rope_dim)  # products for each pair of a token and one that it sees
    return start * rank * both < saved * count * (start + count / 2)


def attend_expanded(
    layer: AttentionLayer, up: UpProjection, q: Tensor, storage: KVStorage, table: Tensor, start: int, end: int
) -> Tensor:
    """The attention of one sequence's tokens at [start, end), whose latents are stored: q [T, heads, ...] -> [T, heads,
    value_dim]."""
    rows = storage.read(layer.index, table, end, q.dtype)[0][:, 0]  # [end, rank + rope_dim]
    latents, rope = rows[:, : layer.latent_dim], rows[:, None, layer.latent_dim :]
    num_heads, both, _ = up.weight.shape
    value_dim = both - up.nope_dim
    out = q.new_empty(len(q), num_heads, value_dim)
    per_group = max(1, EXPANDED_NUMBERS // (end * (both + rope.shape[-1])))
    score = Score(np.float32(layer.scale), 0, np.float32(0.0), 0, np.empty(0, np.float32))
    slots = np.arange(start, end)
    for first in range(0, num_heads, per_group):
        group = slice(first, min(first + per_group, num_heads))
        expanded = up.expand(latents, group)
        keys = torch.cat((expanded[..., : up.nope_dim], rope.expand(-1, expanded.shape[1], -1)), dim=-1)
        values = expanded[..., up.nope_dim :].contiguous()
        sums = q.new_empty(len(q), keys.shape[1], value_dim)
        work = split_work(np.array([0, len(q)]), np.array([start]), np.array([end]), keys.shape[1], value_dim, few=0)
        # The expanded keys and values are a cache of one block.
        cache = Cache(keys[None].numpy(), values[None].numpy(), np.zeros((1, 1), np.int32))
        new = (keys[start:].numpy().copy(), values[start:].numpy().copy())
        the_team().run(attend_layer, q[:, group].contiguous().numpy(), *new, slots, cache, work, score, sums.numpy())
        out[:, group] = sums
    return out
