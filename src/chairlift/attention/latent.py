"""Latent attention (MLA): the interface between a layer and the attention of one step.

The cache holds one latent vector and one rotated key part per token, which all heads share:

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
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.interface import Attend, AttentionLayer


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

    def ready(self) -> tuple[Tensor, Tensor]:
        """q and latent, normalised and rotated."""
        rank, nope = len(self.norm), self.up.nope_dim
        self.latent[:, :rank] = F.rms_norm(self.latent[:, :rank], (rank,), self.norm, self.eps)
        if self.cos is not None and self.sin is not None:
            for heads in (self.q[..., nope:], self.latent[:, None, rank:]):
                _rotate_(heads, self.cos, self.sin)
        return self.q, self.latent


class LatentAttend(ABC):
    """An `Attend` that knows latent attention, and chooses between its two forms."""

    @abstractmethod
    def from_latent(self, layer: AttentionLayer, projection: LatentProjection) -> Tensor:
        """[T, heads, value_dim]; the new latents are stored in the cache."""


def attend_absorbed(attend: Attend, layer: AttentionLayer, projection: LatentProjection) -> Tensor:
    """Latent attention in the absorbed form, by any attention: [T, heads, value_dim]."""
    q, latent = projection.ready()
    return projection.up.values(attend_to_latents(attend, layer, projection.up, q, latent))


def attend_to_latents(attend: Attend, layer: AttentionLayer, up: UpProjection, q: Tensor, latent: Tensor) -> Tensor:
    """Sums of latents [T, heads, rank], from normalised and rotated q and latent."""
    assert layer.latent_dim is not None
    absorbed = q.new_empty(len(q), layer.num_heads, layer.head_dim)
    absorbed[..., : layer.latent_dim] = up.absorb(q[..., : up.nope_dim])
    absorbed[..., layer.latent_dim :] = q[..., up.nope_dim :]
    row = latent[:, None]
    return attend(layer, absorbed, row, row[..., : layer.latent_dim])


def _rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [T, n, rope_dim] in place; dimension i of the first half is paired with i of the second."""
    first, second = heads.chunk(2, dim=-1)
    first_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(first_sin)
