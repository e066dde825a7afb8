"""Latent attention on a GPU: decodes and cached contexts in the absorbed form, the tokens of a chunk expanded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chairlift.attention.batch import PagedLayout
from chairlift.attention.interface import AttentionLayer, LatentProjection
from chairlift.attention.storage import KVStorage
from chairlift.kernels.triton.attention import Chunks
from chairlift.kernels.triton.latent.absorbed import LatentScratch, attend_contexts, attend_singles
from chairlift.kernels.triton.latent.expanded import attend_within_chunks, values_of
from chairlift.kernels.triton.latent.prepare import FEW_ROWS, NewLatents, prepare_and_absorb_, prepare_latents_
from chairlift.kernels.triton.launch import empty_rows, tuned

if TYPE_CHECKING:  # it imports Gluon, which only Hopper needs
    from chairlift.kernels.triton.latent.hopper_decode import HopperScratch


def attend_to_batch(
    layer: AttentionLayer,
    projection: LatentProjection,
    batch: PagedLayout,
    storage: KVStorage,
    scratch: LatentScratch,
    hopper: HopperScratch | None,
) -> Tensor:
    """Store the new latents and attend: [T, heads, value_dim]."""
    q, latent, up, cache = projection.q, projection.latent, projection.up, storage.keys[layer.index]
    rotation = (projection.cos, projection.sin)
    new = NewLatents(projection.norm, projection.eps, *rotation, batch.slots, batch.positions, batch.tables)
    few = len(q) <= FEW_ROWS and tuned()
    if few:
        absorbed = prepare_and_absorb_(q, latent, up.weight, cache, new)
    else:
        prepare_latents_(q, latent, cache, new)
        absorbed = up.absorb(q[..., : up.nope_dim])
    chunks = Chunks.of(batch)
    rank, has_tiles = len(projection.norm), len(batch.tile_chunk) > 0
    q_rope = q[..., up.nope_dim :]
    sums = empty_rows(len(q), layer.num_heads, rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(len(q) if has_tiles else 0, layer.num_heads, dtype=torch.float32, device=q.device)
    where: dict[str, Any] = {"chunks": chunks, "scale": layer.scale}
    if batch.num_single:
        rows = batch.num_single
        # Kernels that serve every step are compiled before the first one; that of Hopper takes longer.
        if hopper is None or not tuned() or not _on_hopper(absorbed, q_rope, cache, sums, rows, hopper, where):
            attend_singles(absorbed, q_rope, cache, sums, rows=rows, scratch=scratch, **where)
    if has_tiles:
        attend_contexts(absorbed, q_rope, cache, sums, lse, **where)
    fuses_values = few and q.dtype != torch.float32  # The tiles of float32 are too large.
    out = values_of(sums, up.weight, up.nope_dim) if fuses_values else up.values(sums)
    if has_tiles:
        kv = up.expand(latent[:, :rank], slice(None))
        attend_within_chunks(q, kv, latent[:, rank:], out, lse, chunks=chunks, scale=layer.scale)
    return out


def _on_hopper(
    q: Tensor, q_rope: Tensor, cache: Tensor, out: Tensor, rows: int, scratch: HopperScratch, where: dict[str, Any]
) -> bool:
    """Attend to the contexts of single tokens by the kernel for Hopper; returns whether it can."""
    from chairlift.kernels.triton.latent import hopper_decode

    if hopper_decode.obstacle(q, q_rope, cache, rows) is not None:
        return False
    hopper_decode.attend_singles(q, q_rope, cache, out, rows=rows, scratch=scratch, **where)
    return True
