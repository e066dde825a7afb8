"""The interface between a model and the attention of one step.

In latent attention (MLA) the cache holds one latent vector and one rotated key part per token, which all heads share:

    cached row     latent [rank] | rope [rope_dim]
    key of head h      up_k[h] · latent | rope          up_k[h] [nope_dim, rank]
    value of head h    up_v[h] · latent                 up_v[h] [value_dim, rank]

There are two ways to compute the same attention:

    absorbed   up_k is applied to the queries and up_v to the result; keys are the cached rows, values their latents.
               Nothing is computed for each cached token: the form for decodes.
    expanded   keys and values of each head are computed from the latents. Scores and sums then need fewer products
               (192 + 128 numbers per head instead of 576 + 512 in DeepSeek V3), which pays if many tokens share them:
               the form for prompts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.batch import RaggedLayout
from chairlift.attention.storage import KVStorage

if TYPE_CHECKING:  # numba is slow to import
    from chairlift.kernels.cpu.attention_work import AttentionWork


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape of one layer's attention: everything that may differ between the layers of a model."""

    index: int  # The layer of the KV storage that it reads and writes.
    num_heads: int
    num_kv_heads: int  # == num_heads: MHA; 1: MQA; in between: GQA
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    chunk: int | None = None  # a token sees only tokens of its own chunk of this many positions
    sinks: bool = False  # every head has a learned logit that takes part in the softmax and has no value
    # Latent attention: values are the first `latent_dim` numbers of the keys, and not stored on their own.
    latent_dim: int | None = None
    # Of sparse attention: it does not attend, but chooses this many positions for tokens of layers that do.
    chooses: int | None = None

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def numbers_per_token(self) -> int:
        """The numbers that the cache holds for a token."""
        return self.num_kv_heads * self.head_dim * (2 if self.latent_dim is None else 1)


class UpProjection(Protocol):
    """The matrices that turn a latent into keys and values of all heads."""

    weight: Tensor  # [heads, nope_dim + value_dim, rank]
    nope_dim: int

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [T, heads, nope_dim] of keys as queries of latents [T, heads, rank]."""
        ...

    def values(self, sums: Tensor) -> Tensor:
        """Sums of latents [T, heads, rank] as sums of values [T, heads, value_dim]."""
        ...

    def expand(self, latents: Tensor, heads: slice) -> Tensor:
        """Latents [n, rank] -> [n, heads, nope_dim + value_dim]: keys without their rotated part, and values."""
        ...


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """What a layer has computed from T tokens; all tensors may be overwritten."""

    q: Tensor  # [T, heads, nope_dim + rope_dim], not rotated yet
    latent: Tensor  # [T, rank + rope_dim], neither normalised nor rotated yet
    norm: Tensor  # [rank]: the weight of the latent's norm
    eps: float
    cos: Tensor | None  # [T, 1, rope_dim // 2]; None: nothing is rotated
    sin: Tensor | None
    up: UpProjection
    chosen: Tensor | None = None  # [T, n]: only these positions are attended to, -1 is none; None: all

    def ready(self) -> tuple[Tensor, Tensor]:
        """q and latent, normalised and rotated."""
        rank, nope = len(self.norm), self.up.nope_dim
        self.latent[:, :rank] = F.rms_norm(self.latent[:, :rank], (rank,), self.norm, self.eps)
        if self.cos is not None and self.sin is not None:
            for heads in (self.q[..., nope:], self.latent[:, None, rank:]):
                _rotate_(heads, self.cos, self.sin)
        return self.q, self.latent


@dataclass(frozen=True, slots=True)
class PlainProjection:
    """A projection to queries, keys and values of T tokens, with no more to be done than kernels can do.

    With heads + kv_heads heads, values are the keys before their norm and rotation. With queries only, the keys and
    values are those that an earlier layer stored.
    """

    qkv: Tensor  # [T, (heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None = None  # [head_dim]: the weight of a root-mean-square norm of each head
    k_norm: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None  # [T, pairs]; None: nothing is rotated
    sin: Tensor | None = None
    v_norm: bool = False  # values are normed as well, without a weight


@dataclass(slots=True)
class Projection:
    """What a layer has computed from T tokens for its queries, keys and values: it can be finished in two ways, each of
    which may overwrite it."""

    # Returns queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim], normalised and rotated. Of a layer
    # that shares the keys and values of an earlier one, they are that layer's.
    heads: Callable[[], tuple[Tensor, Tensor, Tensor]]
    # Returns what a kernel can norm and rotate; None if there is more to be done. A layer that shares the keys and
    # values of an earlier one then has queries only.
    plain: Callable[[], PlainProjection | None]
    sinks: Tensor | None = None  # [heads] float32 if `layer.sinks`


@dataclass(frozen=True, slots=True)
class HostWork:
    """The attention of a step whose batch is in host memory."""

    pieces: AttentionWork  # The pieces that threads share out.
    layout: RaggedLayout
    storage: KVStorage


class StepAttention(ABC):
    """The attention of one step, passed to the model as an argument.

    It stores the new keys and values in the cache and returns, for every token of the ragged batch, the attention over
    its own sequence. T tokens of many sequences are concatenated on the first axis. A subclass has to implement
    `attend`; the others do the same from an earlier point, and may do more in one kernel.
    """

    __slots__ = ()

    @abstractmethod
    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """q [T, heads, head_dim]; k [T, kv_heads, head_dim]; v [T, kv_heads, value_dim] -> [T, heads, value_dim].

        sinks [heads] float32 if `layer.sinks`. A layer that shares the keys and values of an earlier one stores them
        again, in the same place.
        """

    def from_projection(self, layer: AttentionLayer, projection: Projection) -> Tensor:
        """Attend from the projection to queries, keys and values: [T, heads, value_dim]."""
        q, k, v = projection.heads()
        return self.attend(layer, q, k, v, sinks=projection.sinks)

    def from_latent(self, layer: AttentionLayer, projection: LatentProjection) -> Tensor:
        """Latent attention, in the absorbed form unless the backend chooses: [T, heads, value_dim]."""
        q, latent = projection.ready()
        if projection.chosen is None:
            return projection.up.values(self.attend_to_latents(layer, projection.up, q, latent))
        absorbed = absorbed_queries(layer, projection.up, q)
        return projection.up.values(self.attend_to_chosen(layer, absorbed, latent[:, None], projection.chosen))

    def attend_to_latents(self, layer: AttentionLayer, up: UpProjection, q: Tensor, latent: Tensor) -> Tensor:
        """Sums of latents [T, heads, rank], from normalised and rotated q and latent."""
        row = latent[:, None]
        return self.attend(layer, absorbed_queries(layer, up, q), row, row[..., : layer.latent_dim])

    def choose(self, layer: AttentionLayer, q: Tensor, k: Tensor, weights: Tensor) -> Tensor | None:
        """Store the keys of an index and choose positions [T, n] for each token; None: all that it sees.

        Only with `Capabilities.chooses`. q [T, heads, head_dim], k [T, 1, head_dim], weights [T, heads].
        """
        raise NotImplementedError

    def attend_to_chosen(self, layer: AttentionLayer, q: Tensor, latent: Tensor, chosen: Tensor) -> Tensor:
        """Sums of the latents at chosen positions [T, heads, rank], from absorbed queries [T, heads, head_dim]."""
        raise NotImplementedError

    def work(self, layer: AttentionLayer) -> HostWork | None:
        """What a CPU kernel that runs all layers in one call needs of the attention, the same for all layers of one
        shape; None if the attention cannot be a part of one."""
        return None


def absorbed_queries(layer: AttentionLayer, up: UpProjection, q: Tensor) -> Tensor:
    """Queries of keys as queries of latents: [T, heads, head_dim]."""
    assert layer.latent_dim is not None
    absorbed = q.new_empty(len(q), layer.num_heads, layer.head_dim)
    absorbed[..., : layer.latent_dim] = up.absorb(q[..., : up.nope_dim])
    absorbed[..., layer.latent_dim :] = q[..., up.nope_dim :]
    return absorbed


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


def _rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [T, n, rope_dim] in place; dimension i of the first half is paired with i of the second."""
    first, second = heads.chunk(2, dim=-1)
    first_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(first_sin)
