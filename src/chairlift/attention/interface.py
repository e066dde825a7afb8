"""The interface between a model and the attention of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from chairlift.attention.storage import KVStorage

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.attention_work import AttentionWork


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape of one layer's attention: everything that may differ between the layers of a model."""

    index: int  # which layer of the KV storage it reads and writes
    num_heads: int
    num_kv_heads: int  # == num_heads: MHA; 1: MQA; in between: GQA
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    chunk: int | None = None  # a token sees only tokens of its own chunk, of which each has so many positions
    sinks: bool = False  # every head has a learned logit that takes part in the softmax and has no value
    # Latent attention: values are the first `latent_dim` numbers of the keys, and not stored on their own.
    latent_dim: int | None = None

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def numbers_per_token(self) -> int:
        """The numbers that the cache holds for a token."""
        return self.num_kv_heads * self.head_dim * (2 if self.latent_dim is None else 1)


class Attend(Protocol):
    """The attention of one step, passed to the model as an argument.

    It stores the new keys and values in the cache and returns, for every token of the ragged batch, the attention over
    its own sequence. T tokens of many sequences are concatenated on the first axis. A layer that shares the keys and
    values of an earlier one stores them again, in the same place, unless it starts from the projection (see below).
    """

    def __call__(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, heads, head_dim]; k [T, kv_heads, head_dim]; v [T, kv_heads, value_dim] -> [T, heads, value_dim].

        sinks [heads] float32 if `layer.sinks`.
        """
        ...


class FusedAttend(ABC):
    """An `Attend` that can also start from the QKV projection: it then normalizes and rotates queries and keys, too."""

    @abstractmethod
    def __call__(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor: ...

    @abstractmethod
    def from_projection(
        self,
        layer: AttentionLayer,
        qkv: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
        sinks: Tensor | None = None,
        v_norm: bool = False,
    ) -> Tensor:
        """Attend from the QKV projection, which may be overwritten.

        qkv [T, (heads + 2 * kv_heads) * head_dim]; norms [head_dim]; cos, sin [T, pairs]; sinks [heads] float32
        -> [T, heads, head_dim]. `v_norm`: values are normalised, too, without a weight.

        With heads + kv_heads heads, values are the keys before their norm and rotation. With queries only, the keys and
        values are those that an earlier layer stored.
        """


class HostAttend(ABC):
    """An `Attend` whose batch is in host memory, where a kernel that runs all layers in one call can read it."""

    layout: RaggedLayout
    storage: KVStorage

    @abstractmethod
    def __call__(
        self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor: ...

    @abstractmethod
    def work(self, layer: AttentionLayer) -> AttentionWork:
        """The step's attention split into pieces for threads."""


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """Which rows of the batch belong to which sequence, and where each sequence's cache is. S sequences, T tokens.

    Sequence i owns rows [offsets[i], offsets[i + 1]), which are its tokens at positions [starts[i], ends[i]). In a
    rectangle all sequences own equally many rows; those behind a sequence's tokens are padding.

    Other engines call `offsets` query_start_loc and `ends` seq_lens.
    """

    offsets: Sequence[int]  # S + 1, from 0 to T
    starts: Sequence[int]  # S: the tokens of each sequence whose keys and values are already in the cache
    ends: Sequence[int]  # S: each sequence's length after the step
    tables: Tensor  # [S, longest table] int32: logical -> physical block, zero-padded
    slot_mapping: Tensor  # [T] int64: where each token's key and value go: block * block_size + offset


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One ragged batch in device memory, as kernels read it: T tokens of C chunks, all int32.

    A slot is a request's place in the runner's batch, and its row of `tables`. Chunks of a single token come first, so
    that chunk i of them is row i of the batch.
    """

    slots: Tensor  # [T]: the slot of each token's request
    positions: Tensor  # [T]: each token's place in its sequence; -1 in padding rows
    tables: Tensor  # [slots, blocks]
    chunk_slot: Tensor  # [C]
    chunk_row: Tensor  # [C]: the batch row of the chunk's first token
    chunk_start: Tensor  # [C]: that token's position
    chunk_count: Tensor  # [C]: 0 for padding
    num_single: int  # only the first `num_single` chunks may be single tokens
    tile_chunk: Tensor  # [tiles]: the chunk that each tile of queries belongs to, -1 for none
    tile_offset: Tensor  # [tiles]: its first query, counted from the chunk's first
    tile_queries: int  # tokens in a tile
    one_per_request: bool = False  # no request has two rows: no row reads what another writes in the same step
    long_contexts: bool = False  # some single token has a long context
    deep_chunks: bool = False  # some longer chunk has a long context


def visible_mask(layer: AttentionLayer, start: int, end: int, device: torch.device) -> Tensor:
    """[end - start, end] bool: which positions the tokens at [start, end) of one sequence may see."""
    queries = torch.arange(start, end, device=device)[:, None]
    return visible_positions(layer, torch.arange(end, device=device), queries)


def visible_positions(layer: AttentionLayer, positions: Tensor, queries: Tensor) -> Tensor:
    """Which positions a layer's tokens at the positions `queries` may see; the shapes are broadcast."""
    mask = positions <= queries
    if layer.window is not None:
        mask = mask & (positions > queries - layer.window)
    if layer.chunk is not None:
        mask = mask & (positions >= queries // layer.chunk * layer.chunk)
    return mask
