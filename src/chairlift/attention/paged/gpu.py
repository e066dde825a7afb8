"""Ragged attention on a GPU: Triton kernels that read the blocks in place."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend, BatchSpec, Capabilities
from chairlift.attention.batch import PagedLayout, RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, LatentProjection, Projection, StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.kernels.gpu import on_gpu

log = logging.getLogger("chairlift")

if TYPE_CHECKING:
    from chairlift.kernels.triton.attention import Scoring
    from chairlift.kernels.triton.decode import Fresh, Scratch
    from chairlift.kernels.triton.invariant_attention import SpanScratch
    from chairlift.kernels.triton.latent.absorbed import LatentScratch
    from chairlift.kernels.triton.latent.hopper_decode import HopperScratch

T = TypeVar("T")

ANY_LAYERS_QUERIES = 16  # tokens in a tile of queries, where the layers' heads are not known beforehand
LATENT_QUERIES = 64  # tokens in a tile of queries of latent attention
MAX_HEAD = 512  # dimensions of a head
MAX_INVARIANT_HEAD = 256  # the same, with batch invariance
MAX_LATENT = 512  # dimensions: sums of latents are kept in registers
LONG_CONTEXT = 8192  # tokens: longer ones are split into more parts, or read in larger tiles
LARGE_STEP = 512  # rows of a step whose chunks the kernel for Hopper computes, where it can


class PagedGPUAttention(AttentionBackend):
    name = "ragged"
    capabilities = Capabilities(batch_invariant=True, captures=True, sinks=True, chunks=True, several_tables=True)

    def __init__(self, invariant_for: int | None = None) -> None:
        super().__init__(invariant_for)
        self._scratch: dict[tuple[Any, ...], Any] = {}  # The keys are a class and the arguments it is made of.
        self._hopper_scratch: dict[tuple[int, int], HopperScratch | None] = {}  # The keys are (heads, latent size).
        self._small_tiles: dict[tuple[int, int, int], bool] = {}  # The keys are (heads, kv_heads, head_dim).

    @classmethod
    def obstacles(cls, layers: Sequence[AttentionLayer], device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = []
        if not on_gpu(device):
            reasons.append(f"it runs on a GPU, not on {device.type}")
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed")
        if any(layer.latent_dim is None and layer.head_dim > MAX_HEAD for layer in layers):
            reasons.append(f"it takes heads of at most {MAX_HEAD} dimensions")
        if any(layer.latent_dim is not None and layer.latent_dim > MAX_LATENT for layer in layers):
            reasons.append(f"it takes latents of at most {MAX_LATENT} dimensions")
        return reasons

    @classmethod
    def invariance_obstacles(cls, layers: Sequence[AttentionLayer]) -> list[str]:
        if any(layer.latent_dim is not None for layer in layers):
            return ["latent attention on a GPU computes a token in a form that depends on its chunk"]
        if any(layer.head_dim > MAX_INVARIANT_HEAD for layer in layers):
            return [f"batch-invariant attention on a GPU takes heads of at most {MAX_INVARIANT_HEAD} dimensions"]
        return super().invariance_obstacles(layers)

    def begin(self, batch: StepBatch, storage: KVStorage) -> PagedGPUStep:
        return PagedGPUStep(batch.paged or paged_layout(batch.layout), storage, self)

    def batch_spec(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> BatchSpec:
        return BatchSpec(self._tile_queries(layers, dtype), LONG_CONTEXT, partial(self._splits_more, tuple(layers)))

    def _tile_queries(self, layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
        """Tokens in a tile of queries that suits all layers."""
        from chairlift.kernels.triton import attention as triton_attention
        from chairlift.kernels.triton import invariant_attention as triton_invariant_attention

        invariant = self.invariant_for is not None
        for_layer = (triton_invariant_attention if invariant else triton_attention).queries_per_tile
        tiles = (
            int(for_layer(*_heads_of(layer), dtype)) if layer.latent_dim is None else LATENT_QUERIES for layer in layers
        )
        return min(tiles, default=ANY_LAYERS_QUERIES)  # a model may have no attention

    def _splits_more(self, layers: Sequence[AttentionLayer], rows: int) -> bool:
        """Whether a step of `rows` single tokens splits a long context into more parts than a short one."""
        from chairlift.kernels.triton.decode import decode_splits

        if self.invariant_for is not None:
            return False
        heads = {layer.num_kv_heads for layer in layers if _reads_far(layer) and layer.latent_dim is None}
        return any(decode_splits(rows, some, long=True) != decode_splits(rows, some) for some in heads)

    def _shared(self, make: Callable[..., T], *key: Any) -> T:
        """The scratch memory that all layers of one shape share."""
        if (make, *key) not in self._scratch:
            self._scratch[make, *key] = make(*key)
        scratch: T = self._scratch[make, *key]
        return scratch

    def scratch(self, layer: AttentionLayer, device: torch.device) -> Scratch:
        from chairlift.kernels.triton.decode import Scratch

        return self._shared(Scratch, *_heads_of(layer), device)

    def span_scratch(self, layer: AttentionLayer, device: torch.device) -> SpanScratch:
        from chairlift.kernels.triton.invariant_attention import SpanScratch

        assert self.invariant_for is not None
        return self._shared(SpanScratch, *_heads_of(layer), self.invariant_for, device)

    def latent_scratch(self, layer: AttentionLayer, device: torch.device) -> LatentScratch:
        from chairlift.kernels.triton.latent.absorbed import LatentScratch

        return self._shared(LatentScratch, layer.num_heads, layer.value_dim, device)

    def hopper_scratch(self, layer: AttentionLayer, device: torch.device) -> HopperScratch | None:
        """That of the kernel for single tokens on Hopper; None if it cannot compute such layers."""
        from chairlift.kernels.triton.launch import hopper_obstacle

        key = (layer.num_heads, layer.value_dim)
        if key not in self._hopper_scratch:
            self._hopper_scratch[key] = None
            if (reason := hopper_obstacle(device)) is None:
                from chairlift.kernels.triton.latent.hopper_decode import HopperScratch, layer_obstacle

                if (reason := layer_obstacle(*key, device)) is None:
                    self._hopper_scratch[key] = HopperScratch(*key, device)
            if reason is not None:
                log.debug(f"single tokens use the general kernel of latent attention, not Hopper's: {reason}")
        return self._hopper_scratch[key]

    def reserve(self, layers: Sequence[AttentionLayer], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        for layer in layers:
            if layer.latent_dim is not None:
                self.latent_scratch(layer, device)
                self.hopper_scratch(layer, device)
            elif self.invariant_for is None:
                self.scratch(layer, device)
            else:
                self.span_scratch(layer, device)
                self._try_small_tiles(layer, dtype, device)

    def _try_small_tiles(self, layer: AttentionLayer, dtype: torch.dtype, device: torch.device) -> None:
        """Find out whether single tokens may have tiles of their own; a GPU that is not there is assumed to agree."""
        from chairlift.kernels.triton.invariant_decode import small_tiles_agree

        key = _heads_of(layer)
        if key in self._small_tiles or device.type == "meta":
            return
        self._small_tiles[key] = small_tiles_agree(*key, dtype, device)
        if not self._small_tiles[key]:
            log.warning("single tokens are attended to in large tiles: small ones give other bits on this GPU")

    def queries_of_singles(self, layer: AttentionLayer, batch: PagedLayout) -> int:
        """Queries that a tile of a single token has room for with batch invariance: as many as that of a chunk where a
        smaller one has other bits."""
        return 1 if self._small_tiles.get(_heads_of(layer), True) else batch.tile_queries


def _heads_of(layer: AttentionLayer) -> tuple[int, int, int]:
    """What layers that share scratch memory have in common."""
    return layer.num_heads, layer.num_kv_heads, layer.head_dim


def _reads_far(layer: AttentionLayer) -> bool:
    nearest = layer.window or layer.chunk
    return nearest is None or nearest > LONG_CONTEXT


def paged_layout(layout: RaggedLayout, tile_queries: int = ANY_LAYERS_QUERIES) -> PagedLayout:
    """The layout of a batch that was built in host memory, in device memory."""
    device = layout.tables.device
    counts = [end - start for start, end in zip(layout.starts, layout.ends, strict=True)]
    num_single = next((i for i, count in enumerate(counts) if count > 1), len(counts))
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    places = torch.arange(len(rows)) - torch.tensor(layout.offsets[:-1])[rows]
    tiles = [(i, first) for i, count in enumerate(counts) if i >= num_single for first in range(0, count, tile_queries)]

    # Triton compiles another variant of a kernel for block tables that are not a multiple of 16 columns wide.
    def padded(tables: Tensor) -> Tensor:
        missing = -tables.shape[1] % 16
        return F.pad(tables, (0, missing)) if missing else tables

    def on_device(values: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    return PagedLayout(
        slots=on_device(rows),
        positions=on_device(places + torch.tensor(layout.starts)[rows]),
        tables=padded(layout.tables),
        beside=[padded(each.tables) for each in layout.beside],
        chunk_slot=on_device(range(len(counts))),
        chunk_row=on_device(layout.offsets[:-1]),
        chunk_start=on_device(layout.starts),
        chunk_count=on_device(counts),
        num_single=num_single,
        tile_chunk=on_device([chunk for chunk, _ in tiles]),
        tile_offset=on_device([first for _, first in tiles]),
        tile_queries=tile_queries,
        long_contexts=max(layout.ends[:num_single], default=0) > LONG_CONTEXT,
        deep_chunks=max(layout.starts[num_single:], default=0) > LONG_CONTEXT,
    )


@dataclass(frozen=True, slots=True)
class PagedGPUStep(StepAttention):
    batch: PagedLayout
    storage: KVStorage
    backend: PagedGPUAttention

    def _batch_of(self, layer: AttentionLayer) -> PagedLayout:
        """The batch with the block tables of a layer."""
        return self.batch.with_table(self.storage.place(layer.index)[1])

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        batch, block_size = self._batch_of(layer), self.storage.block_size
        positions = batch.positions.long()
        blocks = batch.tables[batch.slots.long(), positions.clamp(min=0) // block_size].long()
        places = torch.where(positions < 0, self.storage.scratch_block, blocks) * block_size
        self.storage.write(layer.index, places + positions.clamp(min=0) % block_size, k, v)
        return self._attended(layer, q, sinks)

    def from_projection(self, layer: AttentionLayer, projection: Projection) -> Tensor:
        from chairlift.kernels.triton.decode import Fresh
        from chairlift.kernels.triton.launch import empty_rows, tuned
        from chairlift.kernels.triton.layers import rotate_and_store_

        plain = projection.plain()
        if plain is None:
            return StepAttention.from_projection(self, layer, projection)  # `super()` fails in classes with slots.
        batch, heads, sinks = self._batch_of(layer), plain.qkv.unflatten(1, (-1, layer.head_dim)), projection.sinks
        fresh = Fresh(plain.q_norm, plain.k_norm, plain.eps, plain.cos, plain.sin, plain.v_norm)
        if batch.one_per_request and not len(batch.tile_chunk) and tuned() and self._begins_fresh(layer, heads, fresh):
            out = empty_rows(len(heads), layer.num_heads, layer.head_dim, dtype=heads.dtype, device=heads.device)
            self._decode(layer, heads, out, sinks, fresh)
            return out  # a step of single tokens only, in one kernel
        rotate_and_store_(
            plain.qkv,
            self.storage.keys[layer.index],
            self.storage.values[layer.index],
            fresh,
            num_heads=layer.num_heads,
            slots=batch.slots,
            positions=batch.positions,
            tables=batch.tables,
        )
        return self._attended(layer, heads[:, : layer.num_heads], sinks)

    def from_latent(self, layer: AttentionLayer, projection: LatentProjection) -> Tensor:
        from chairlift.attention.paged.latent_gpu import attend_to_batch

        device = projection.q.device
        scratch, hopper = self.backend.latent_scratch(layer, device), self.backend.hopper_scratch(layer, device)
        return attend_to_batch(layer, projection, self.batch, self.storage, scratch, hopper)

    def _begins_fresh(self, layer: AttentionLayer, heads: Tensor, fresh: Fresh) -> bool:
        """Whether the kernel of single tokens can take them as the projection made them."""
        from chairlift.kernels.triton.invariant_decode import can_begin_fresh

        if self.backend.invariant_for is None:
            return True
        all_new = heads.shape[1] == layer.num_heads + 2 * layer.num_kv_heads
        return all_new and can_begin_fresh(layer.head_dim, fresh)

    def _decode(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, sinks: Tensor | None, fresh: Fresh | None = None
    ) -> None:
        from chairlift.kernels.triton.decode import decode_attention
        from chairlift.kernels.triton.invariant_decode import invariant_decode

        batch, backend = self._batch_of(layer), self.backend
        arguments: dict[str, Any] = {
            "tables": batch.tables,
            "row_slot": batch.chunk_slot[: batch.num_single],
            "row_start": batch.chunk_start,
            "row_count": batch.chunk_count,
            "scoring": _scoring(layer, sinks),
            "fresh": fresh,
        }
        keys, values = self.storage.keys[layer.index], self.storage.values[layer.index]
        if backend.invariant_for is None:
            long = batch.long_contexts and _reads_far(layer)
            decode_attention(q, keys, values, out, **arguments, scratch=backend.scratch(layer, q.device), long=long)
        else:
            scratch, queries = backend.span_scratch(layer, q.device), backend.queries_of_singles(layer, batch)
            invariant_decode(q, keys, values, out, **arguments, scratch=scratch, tile_queries=queries)

    def _attended(self, layer: AttentionLayer, q: Tensor, sinks: Tensor | None) -> Tensor:
        from chairlift.kernels.triton.launch import empty_rows

        out = empty_rows(*q.shape, dtype=q.dtype, device=q.device)
        if self.batch.num_single:
            self._decode(layer, q, out, sinks)
        if len(self.batch.tile_chunk):
            self._prefill(layer, q, out, sinks)
        return out

    def _prefill(self, layer: AttentionLayer, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Attention of the longer chunks."""
        from chairlift.kernels.triton.attention import Chunks, prefill_attention
        from chairlift.kernels.triton.invariant_attention import invariant_attention
        from chairlift.kernels.triton.launch import hopper_obstacle, tuned

        batch = self._batch_of(layer)
        keys, values = self.storage.keys[layer.index], self.storage.values[layer.index]
        chunks, scoring = Chunks.of(batch), _scoring(layer, sinks)
        if self.backend.invariant_for is not None:
            invariant_attention(q, keys, values, out, chunks, scoring)
            return
        if tuned() and len(q) >= LARGE_STEP and hopper_obstacle(q.device) is None:
            from chairlift.kernels.triton.hopper_prefill import hopper_prefill_attention, obstacles

            if not obstacles(q, keys, values, batch.tile_queries, scoring):
                hopper_prefill_attention(q, keys, values, out, chunks, scoring)
                return
        deep = batch.deep_chunks and _reads_far(layer)
        prefill_attention(q, keys, values, out, chunks, scoring, deep=deep)


def _scoring(layer: AttentionLayer, sinks: Tensor | None) -> Scoring:
    from chairlift.kernels.triton.attention import Scoring

    return Scoring(layer.scale, layer.window, layer.softcap, layer.chunk, sinks)
