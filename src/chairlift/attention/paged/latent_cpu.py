"""Latent attention on the CPU: decodes in the absorbed form, prompts in the expanded form where it takes less work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import RaggedLayout
from chairlift.attention.interface import AttentionLayer, UpProjection
from chairlift.attention.storage import KVStorage

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
    saved = layer.head_dim + rank - (both + rope_dim)  # per pair of a token and one that it sees
    return start * rank * both < saved * count * (start + count / 2)


def attend_expanded(
    layer: AttentionLayer, up: UpProjection, q: Tensor, storage: KVStorage, table: Tensor, start: int, end: int
) -> Tensor:
    """The attention of one sequence's tokens at [start, end), whose latents are stored: q [T, heads, ...] -> [T, heads,
    value_dim]."""
    from chairlift.kernels.cpu.attention import Cache, Score
    from chairlift.kernels.cpu.attention_work import split_work
    from chairlift.kernels.cpu.decoder import attend_layer
    from chairlift.kernels.cpu.threads import the_team

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
        found = q.new_empty(len(q), keys.shape[1], value_dim)
        work = split_work(np.array([0, len(q)]), np.array([start]), np.array([end]), keys.shape[1], value_dim, few=0)
        # The expanded keys and values are a cache of one block.
        cache = Cache(keys[None].numpy(), values[None].numpy(), np.zeros((1, 1), np.int32))
        new = (keys[start:].numpy().copy(), values[start:].numpy().copy())
        the_team().run(attend_layer, q[:, group].contiguous().numpy(), *new, slots, cache, work, score, found.numpy())
        out[:, group] = found
    return out
