"""Sparse attention for batches that the host describes: an index chooses positions, and only their latents are read.

The index keys of all tokens are in the paged cache, as a layer of their own. A token's score of a position is

    sum over index heads h of   weight[h] * relu(q[h] · key[position])

and it attends to the positions with the highest scores. Factors that do not change their order are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.batch import RaggedLayout
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage

NONE = -1  # fills the rows of tokens that see fewer positions than others choose
READ_NUMBERS = 2**23  # numbers of chosen latents that are in memory at a time


class SequenceRows(NamedTuple):
    """Some rows of one sequence."""

    sequence: int
    rows: slice  # The batch's.
    start: int  # the position of the first
    end: int  # the length of the sequence behind the last; padding of a rectangle sees what the last token sees


def rows_of(layout: RaggedLayout, most: int) -> Iterator[SequenceRows]:
    """The rows of a batch, at most `most` of one sequence at a time."""
    for index, (start, end) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        first, last = layout.offsets[index], layout.offsets[index + 1]
        for row in range(first, last, most):
            behind = min(row + most, last)
            yield SequenceRows(index, slice(row, behind), start + row - first, min(start + behind - first, end))


def choose_positions(
    layer: AttentionLayer,
    layout: RaggedLayout,
    storage: KVStorage,
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    *,
    alone: bool = False,
) -> Tensor | None:
    """Store the index keys [T, 1, head_dim] of new tokens and choose [T, n] positions for each of them; None if every
    token attends to all that it sees.

    queries [T, heads, head_dim], weights [T, heads]. `alone`: a row's numbers must not depend on the other rows.
    """
    assert layer.chooses is not None
    storage.write(layer.index, layout.slot_mapping, keys, keys)
    longest = max(layout.ends)
    if longest <= layer.chooses and not alone:  # A row that is alone must be computed in one way in all batches.
        return None
    chosen = torch.full((len(queries), layer.chooses), NONE, dtype=torch.int64, device=queries.device)
    for sequence, rows, start, length in rows_of(layout, 1 if alone else 64):
        stored = storage.read(layer.index, layout.tables[sequence], length, queries.dtype)[0][:, 0]
        scores = F.relu(queries[rows].float() @ stored.float().mT)  # [rows, heads, length]
        totals = (weights[rows].float()[:, None] @ scores)[:, 0]
        positions = torch.arange(length, device=queries.device)
        own = torch.arange(start, start + len(totals), device=queries.device).clamp(max=length - 1)
        hidden = positions > own[:, None]
        count = min(layer.chooses, length)
        best = totals.masked_fill_(hidden, -torch.inf).topk(count, dim=1).indices
        chosen[rows, :count] = torch.where(hidden.gather(1, best), NONE, best).sort(dim=1, descending=True).values
    return chosen


def attend_to_chosen(
    layer: AttentionLayer,
    layout: RaggedLayout,
    storage: KVStorage,
    queries: Tensor,
    latents: Tensor,
    chosen: Tensor,
    *,
    alone: bool = False,
) -> Tensor:
    """Store the latents [T, 1, head_dim] and attend to those at the positions `chosen` [T, n] only.

    queries [T, heads, head_dim] in the absorbed form -> sums of latents [T, heads, latent_dim].
    """
    storage.write(layer.index, layout.slot_mapping, latents, latents)
    out = queries.new_empty(*queries.shape[:2], layer.value_dim)
    size = storage.block_size
    most = 1 if alone else max(1, READ_NUMBERS // (chosen.shape[1] * layer.head_dim))
    for sequence, rows, _, length in rows_of(layout, most):
        own = chosen[rows]
        if alone:
            own = own[:, :length]
        places = own.clamp(min=0)
        blocks = layout.tables[sequence].long()[places // size]
        read = storage.select(layer.index, (blocks * size + places % size).flatten(), queries.dtype)
        read = read[:, 0].unflatten(0, own.shape).float()  # [rows, n, head_dim]
        scores = (queries[rows].float() @ read.mT).mul_(layer.scale).masked_fill_((own < 0)[:, None], -torch.inf)
        out[rows] = (scores.softmax(dim=-1) @ read[..., : layer.value_dim]).to(out.dtype)
    return out
