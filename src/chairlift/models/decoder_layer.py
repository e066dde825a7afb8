"""One layer of a decoder: attention and a feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from chairlift.attention.interface import Attend, AttentionLayer, FusedAttend
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.moe import MixtureOfExperts, SharedExpert
from chairlift.layers.norm import RMSNorm
from chairlift.layers.parts import Part, Targets, prefixed
from chairlift.layers.rope import Rotation, rotate_
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.experts import ExpertNames


class SelfAttention:
    """Projects to queries, keys and values in one product, rotates them, and calls `attend`.

    The caller applies the output projection, because one kernel may do it together with the addition that follows.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: AttentionLayer,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat],
    ) -> None:
        self.layer = layer
        self.fused_names = config.fused_names
        self.query_size = layer.num_heads * layer.head_dim
        self.key_size = layer.num_kv_heads * layer.head_dim
        hidden, both = config.hidden_size, self.query_size + 2 * self.key_size
        self.qkv = Linear.empty(hidden, both, bias=config.qkv_bias, dtype=dtype, device=device, format=format)
        self.output = Linear.empty(
            self.query_size, hidden, bias=config.output_bias, dtype=dtype, device=device, format=format
        )
        # In float32, as the softmax that they are part of.
        self.sinks = torch.empty(layer.num_heads, dtype=torch.float32, device=device) if layer.sinks else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm is not None:
            full = config.qk_norm == "full"
            self.q_norm = make_norm(config, self.query_size if full else layer.head_dim, dtype, device)
            self.k_norm = make_norm(config, self.key_size if full else layer.head_dim, dtype, device)
        self._norms_all_heads = config.qk_norm == "full"

    def targets(self) -> Targets:
        if self.fused_names:
            yield from self.qkv.targets(["qkv_proj"])
        else:
            sizes = [self.query_size, self.key_size, self.key_size]
            yield from self.qkv.targets(["q_proj", "k_proj", "v_proj"], sizes)
        yield from self.output.targets(["o_proj"])
        if self.sinks is not None:
            yield "sinks", self.sinks
        if self.q_norm is not None and self.k_norm is not None:
            yield "q_norm.weight", self.q_norm.weight
            yield "k_norm.weight", self.k_norm.weight

    def parts(self) -> Iterator[Part]:
        yield from (self.qkv, self.output)
        if self.q_norm is not None and self.k_norm is not None:
            yield from (self.q_norm, self.k_norm)

    def __call__(self, x: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        layer = self.layer
        if isinstance(attend, FusedAttend) and not self._norms_all_heads:
            return self.attended(self.qkv(x), rotation, attend)
        heads = self.qkv(x).unflatten(-1, (-1, layer.head_dim))  # [T, heads + 2 * kv_heads, head_dim]
        qk, v = heads.split((layer.num_heads + layer.num_kv_heads, layer.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = self._normalised(qk, self.q_norm, self.k_norm)
        if rotation is not None:
            rotate_(qk, rotation)  # queries and keys together
        q, k = qk.split((layer.num_heads, layer.num_kv_heads), dim=1)
        return attend(layer, q, k, v, sinks=self.sinks).flatten(1)

    def attended(self, qkv: Tensor, rotation: Rotation | None, attend: FusedAttend) -> Tensor:
        """qkv [T, ...], the projection, which may be overwritten -> [T, query_size]."""
        heads = attend.from_projection(
            self.layer,
            qkv,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            cos=None if rotation is None else rotation.cos,
            sin=None if rotation is None else rotation.sin,
            sinks=self.sinks,
        )
        return heads.flatten(1)

    def _normalised(self, qk: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """Normalise per head, or over all heads together, by the size of the norms."""
        q, k = qk.split((self.layer.num_heads, self.layer.num_kv_heads), dim=1)
        q = q_norm(q.reshape(len(q), -1, len(q_norm.weight))).reshape(q.shape)
        k = k_norm(k.reshape(len(k), -1, len(k_norm.weight))).reshape(k.shape)
        return torch.cat((q, k), dim=1)


class DecoderLayer:
    """Attention and a feed-forward block, each added to the residual stream, with norms where the family has them."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
    ) -> None:
        self.rope = layer.rope
        self.fused_names = config.fused_names
        self.experts = layer.experts
        self.attention = SelfAttention(config, layer.attention, dtype, device, format)
        self.mlp = _feed_forward(config, layer, dtype, device, format)
        names = config.norms
        self.norms = {
            name: make_norm(config, config.hidden_size, dtype, device)
            for name in (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
            if name is not None
        }
        self.before_attention = self.norms.get(names.before_attention or "")
        self.after_attention = self.norms.get(names.after_attention or "")
        self.before_mlp = self.norms.get(names.before_mlp or "")
        self.after_mlp = self.norms.get(names.after_mlp or "")

    def targets(self) -> Targets:
        yield from prefixed("self_attn", self.attention.targets())
        yield from ((f"{name}.weight", norm.weight) for name, norm in self.norms.items())
        if isinstance(self.mlp, MixtureOfExperts):
            assert self.experts is not None
            yield from prefixed(self.experts.names.block, _expert_targets(self.mlp, self.experts.names))
        else:
            yield from prefixed("mlp", self.mlp.targets(self.fused_names))

    def linears(self) -> tuple[Linear, ...]:
        return (self.attention.qkv, self.attention.output, *self.mlp.linears())

    def parts(self) -> Iterator[Part]:
        yield from self.attention.parts()
        yield from self.norms.values()
        yield self.mlp

    def __call__(
        self, x: Tensor, delta: Tensor | None, positions: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor | None:
        return self.rest(x, self.attended(x, delta, rotation, attend), positions)

    def attended(self, x: Tensor, delta: Tensor | None, rotation: Rotation | None, attend: Attend) -> Tensor:
        """Add `delta`, the output of the block before, to the residual stream `x` in place; return the attention."""
        return self.attention(add_(x, delta, self.before_attention), rotation, attend)

    def rest(self, x: Tensor, attended: Tensor, positions: Tensor) -> Tensor | None:
        """Everything behind the attention, row by row; returns what has still to be added to `x`.

        Adding late allows a sum and its norm to be one pass over the data.
        """
        delta = _project(self.attention.output, attended, x, self.after_attention)
        normed = add_(x, delta, self.before_mlp)
        if isinstance(self.mlp, MixtureOfExperts):
            return _normed(self.after_mlp, self.mlp(normed, positions))
        return _project(self.mlp.down, self.mlp.inner(normed), x, self.after_mlp)


def add_(x: Tensor, delta: Tensor | None, norm: RMSNorm | None) -> Tensor:
    """Add `delta` to `x` in place; return the sum, normed if there is a norm."""
    if delta is not None and norm is not None:
        return norm.add_(x, delta)
    if delta is not None:
        x.add_(delta)
    return _normed(norm, x)


def make_norm(config: DecoderConfig, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, unit_offset=config.norm_unit_offset, dtype=dtype, device=device)


def _project(linear: Linear, y: Tensor, x: Tensor, norm: RMSNorm | None) -> Tensor | None:
    """linear(y), which is to be added to `x`; None if it has been added already."""
    if norm is None and linear.adds_in_place(y):
        linear.add_to_(x, y)
        return None
    return _normed(norm, linear(y))


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _feed_forward(
    config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device, format: type[WeightFormat]
) -> GatedMLP | MixtureOfExperts:
    if layer.experts is None:
        return GatedMLP(
            config.hidden_size,
            layer.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            format=format,
        )
    kind: dict[str, Any] = {"activation": config.activation, "dtype": dtype, "device": device}
    shared = None
    if layer.experts.shared_size:
        is_gated = layer.experts.names.shared_gate is not None
        shared = SharedExpert(config.hidden_size, layer.experts.shared_size, is_gated=is_gated, format=format, **kind)
    return MixtureOfExperts(config.hidden_size, layer.intermediate_size, layer.experts.routing, shared=shared, **kind)


def _expert_targets(mlp: MixtureOfExperts, names: ExpertNames) -> Targets:
    yield from mlp.router.targets(names.router, names.correction_bias)
    yield from prefixed(names.experts, mlp.expert_targets(names.gate, names.up, names.down))
    if mlp.shared is not None:
        assert names.shared is not None
        yield from mlp.shared.targets(names.shared, names.shared_gate or "")
