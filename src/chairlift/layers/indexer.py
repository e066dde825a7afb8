"""The small attention of sparse models, which chooses the positions that each token attends to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.layers.linear import Build
from chairlift.layers.norm import LayerNorm
from chairlift.layers.parts import Part, PermutedHeads, Targets
from chairlift.layers.rope import Rotation, rotate_


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The sizes of a layer's index."""

    layer: AttentionLayer  # Its keys, one head, are stored as those of this layer.
    rope_dim: int  # The first dimensions of a head have rotation.
    interleaved_rope: bool  # the checkpoint pairs neighbouring dimensions instead of halves
    eps: float = 1e-6

    def num_parameters(self, hidden_size: int, q_rank: int) -> int:
        heads, size = self.layer.num_heads, self.layer.head_dim
        return q_rank * heads * size + hidden_size * (size + heads) + 2 * size


@dataclass(slots=True)
class IndexChoice:
    """The positions that the last layer with an index chose in a step; layers without one use them, too."""

    positions: Tensor | None = None  # [T, n], -1 for none; None: every token attends to all that it sees


class Indexer(Part):
    """Makes queries, keys and weights of heads from the hidden states and the latents of queries."""

    def __init__(self, hidden_size: int, q_rank: int, shape: IndexShape, build: Build) -> None:
        self.shape, layer = shape, shape.layer
        self.query = build.linear(q_rank, layer.num_heads * layer.head_dim)
        self.key = build.plain.linear(hidden_size, layer.head_dim)
        self.norm = LayerNorm(layer.head_dim, shape.eps, build, bias=True)
        self.weights = build.plain.linear(hidden_size, layer.num_heads)

    def targets(self) -> Targets:
        yield from self.weights.targets(["weights_proj"])
        order = torch.arange(self.shape.layer.head_dim)
        if self.shape.interleaved_rope:  # Reorder dimensions so that rotated pairs are in separate halves.
            rotated = order[: self.shape.rope_dim].view(-1, 2).T.flatten()
            order = torch.cat((rotated, order[self.shape.rope_dim :]))
        for part in (self.query.targets(["wq_b"]), self.key.targets(["wk"]), self.norm.targets("k_norm")):
            yield from ((name, PermutedHeads(target, order, axis=0)) for name, target in part)

    def parts(self) -> Iterable[Part]:
        return self.query, self.key, self.norm, self.weights

    def __call__(
        self, x: Tensor, q_latent: Tensor, rotation: Rotation | None, attention: StepAttention
    ) -> Tensor | None:
        """x [T, hidden], q_latent [T, q_rank] -> the positions to attend to [T, n]; None: all."""
        layer = self.shape.layer
        queries, keys = self.query(q_latent).unflatten(1, (-1, layer.head_dim)), self.norm(self.key(x))[:, None]
        if rotation is not None:
            rotate_(queries, rotation)
            rotate_(keys, rotation)
        return attention.choose(layer, queries, keys, self.weights(x))
