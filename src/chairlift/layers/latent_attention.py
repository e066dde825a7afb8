"""Latent attention (MLA): queries, keys and values come from small latent vectors, of which one per token is cached."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.interface import AttentionLayer, LatentProjection, StepAttention
from chairlift.layers.indexer import IndexChoice, Indexer, IndexShape
from chairlift.layers.linear import Build, Linear
from chairlift.layers.norm import RMSNorm
from chairlift.layers.parts import Part, PermutedHeads, Target, Targets, add_prefix, present
from chairlift.layers.rope import Rotation
from chairlift.layers.rows import in_tiles


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of a layer's latent attention."""

    q_rank: int | None  # None: queries are projected directly
    rank: int
    nope_dim: int  # These dimensions of a head's queries and keys have no rotation.
    rope_dim: int  # These follow and have rotation; all heads share the key's.
    value_dim: int
    bias: bool  # The products from the hidden state to latents have one, and so has the output.
    interleaved_rope: bool  # the checkpoint pairs neighbouring dimensions instead of halves
    eps: float = 1e-6  # The latents' norms have it, whatever that of the layer is.

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        queries = num_heads * (self.nope_dim + self.rope_dim)
        q = hidden_size * queries
        if self.q_rank is not None:
            q = hidden_size * self.q_rank + self.q_rank + self.q_rank * queries + self.q_rank * self.bias
        latent = (hidden_size + self.bias) * (self.rank + self.rope_dim) + self.rank
        up = num_heads * (self.nope_dim + self.value_dim) * self.rank
        return q + latent + up + num_heads * self.value_dim * hidden_size + hidden_size * self.bias


class HeadUpProjection(Part):
    """The matrices that turn a latent into keys and values; always plain, because both forms read them."""

    def __init__(self, num_heads: int, shape: LatentShape, build: Build) -> None:
        self.weight = build.empty(num_heads, shape.nope_dim + shape.value_dim, shape.rank)
        self.nope_dim = shape.nope_dim

    def targets(self, name: str) -> Targets:
        yield f"{name}.weight", self.weight.flatten(0, 1)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def absorb(self, q: Tensor) -> Tensor:
        return self._by_head(q, self.weight[:, : self.nope_dim])

    def values(self, sums: Tensor) -> Tensor:
        return self._by_head(sums, self.weight[:, self.nope_dim :].mT)

    def expand(self, latents: Tensor, heads: slice) -> Tensor:
        weight = self.weight[heads]
        return (latents @ weight.flatten(0, 1).mT).view(len(latents), len(weight), -1)

    def _by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, heads, in], weight [heads, in, out] -> [T, heads, out]."""

        def multiply(rows: Tensor) -> Tensor:
            by_head = rows.view(len(rows), *x.shape[1:]).transpose(0, 1)
            out = rows.new_empty(len(rows), len(weight), weight.shape[2])
            torch.bmm(by_head, weight, out=out.transpose(0, 1))
            return out

        return in_tiles(multiply, x.flatten(1)) if self.batch_invariant else multiply(x)


class LatentAttention(Part):
    """Projects to queries and one latent per token, and attends from them; the caller applies the output projection."""

    def __init__(
        self,
        hidden_size: int,
        layer: AttentionLayer,
        shape: LatentShape,
        build: Build,
        *,
        index: IndexShape | None = None,
        shares_choice: bool = False,
    ) -> None:
        """`index`: attention is sparse; `shares_choice`: and so it is where an earlier layer has chosen."""
        self.layer = layer
        self.shares_choice = shares_choice
        self.shape = shape
        self._head_dim = shape.nope_dim + shape.rope_dim
        queries = layer.num_heads * self._head_dim
        # One product for everything that is computed from the hidden state: the queries or their latent, and the latent
        # of keys and values.
        self._sizes = [queries if shape.q_rank is None else shape.q_rank, shape.rank + shape.rope_dim]
        self.down = build.linear(hidden_size, sum(self._sizes), bias=shape.bias)
        self.q_norm: RMSNorm | None = None
        self.q_up: Linear | None = None
        if shape.q_rank is not None:
            self.q_norm = RMSNorm(shape.q_rank, shape.eps, build)
            self.q_up = build.linear(shape.q_rank, queries)
        self.kv_norm = RMSNorm(shape.rank, shape.eps, build)
        self.up = HeadUpProjection(layer.num_heads, shape, build)
        self.output = build.linear(layer.num_heads * shape.value_dim, hidden_size, bias=shape.bias)
        self.indexer: Indexer | None = None
        if index is not None:
            assert shape.q_rank is not None
            self.indexer = Indexer(hidden_size, shape.q_rank, index, build)

    def targets(self) -> Targets:
        direct, shape = self.q_up is None, self.shape
        for name, target in self.down.targets(["q_proj" if direct else "q_a_proj", "kv_a_proj_with_mqa"], self._sizes):
            if name == "q_proj.bias":
                assert isinstance(target, Tensor)
                target.zero_()  # the checkpoint has none
            elif name.startswith("q_a_proj."):
                yield name, target
            else:
                yield name, self._unpair(target, shape.nope_dim if name.startswith("q_proj.") else shape.rank)
        if self.q_up is not None and self.q_norm is not None:
            yield from self.q_norm.targets("q_a_layernorm")
            for name, target in self.q_up.targets(["q_b_proj"]):
                yield name, self._unpair(target, shape.nope_dim)
        yield from self.kv_norm.targets("kv_a_layernorm")
        yield from self.up.targets("kv_b_proj")
        yield from self.output.targets(["o_proj"])
        if self.indexer is not None:
            yield from add_prefix("indexer", self.indexer.targets())

    def _unpair(self, target: Target, unrotated: int) -> Target:
        """Reorder the rotated dimensions, behind `unrotated` ones, so that rotated pairs are in separate halves."""
        if not self.shape.interleaved_rope:
            return target
        rotated = torch.arange(self.shape.rope_dim).view(-1, 2).T.flatten()
        return PermutedHeads(target, torch.cat((torch.arange(unrotated), unrotated + rotated)), axis=0)

    def parts(self) -> tuple[Part, ...]:
        return present(self.down, self.q_up, self.output, self.kv_norm, self.up, self.q_norm, self.indexer)

    def __call__(
        self, x: Tensor, rotation: Rotation | None, attention: StepAttention, choice: IndexChoice | None = None
    ) -> Tensor:
        """`choice`: what the layers of a sparse model share in a step."""
        q, latent = self.down(x).split(self._sizes, dim=1)
        if self.q_up is not None and self.q_norm is not None:
            q_latent = self.q_norm(q.contiguous())
            q = self.q_up(q_latent)
            if self.indexer is not None:
                assert choice is not None
                choice.positions = self.indexer(x, q_latent, rotation, attention)
        is_sparse = self.indexer is not None or self.shares_choice
        projection = LatentProjection(
            q=q.unflatten(1, (-1, self._head_dim)),
            latent=latent,
            norm=self.kv_norm.weight,
            eps=self.kv_norm.eps,
            cos=None if rotation is None else rotation.cos,
            sin=None if rotation is None else rotation.sin,
            up=self.up,
            chosen=choice.positions if choice is not None and is_sparse else None,
        )
        return attention.from_latent(self.layer, projection).flatten(1)
