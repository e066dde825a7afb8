"""One layer of a decoder: attention or a recurrent block, and a feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from chairlift.attention.interface import Attend, AttentionLayer, FusedAttend
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.latent_attention import LatentAttention
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import DenseMLP, GatedMLP, UngatedMLP
from chairlift.layers.moe import MixtureOfExperts, SharedExpert
from chairlift.layers.norm import LayerNorm, Norm, RMSNorm
from chairlift.layers.output_gate import OutputGate
from chairlift.layers.parts import Part, PermutedHeads, Targets, prefixed
from chairlift.layers.recurrent.interface import RecurrentStep
from chairlift.layers.rope import Rope, Rotation, rotate_
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
        rope: Rope | None,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat],
    ) -> None:
        self.layer = layer
        self.names = config.names
        self.query_size = layer.num_heads * layer.head_dim
        self.key_size = layer.num_kv_heads * layer.head_dim
        self.gate = OutputGate(layer.num_heads, layer.head_dim) if config.gated_attention else None
        self._output_scale = config.attention_output_scale
        self._gate_size = self.query_size if self.gate is not None else 0
        hidden, both = config.hidden_size, self._gate_size + self.query_size + 2 * self.key_size
        self.qkv = Linear.empty(hidden, both, bias=config.qkv_bias, dtype=dtype, device=device, format=format)
        self.output = Linear.empty(
            self.query_size, hidden, bias=config.output_bias, dtype=dtype, device=device, format=format
        )
        # In float32, as the softmax that they are part of.
        self.sinks = torch.empty(layer.num_heads, dtype=torch.float32, device=device) if layer.sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self._norms_have_weights = config.qk_norm != "unweighted"
        if config.qk_norm is not None and (self._norms_have_weights or (rope is not None and rope.inv_freq)):
            self.q_norm, self.k_norm = (
                make_norm(config, _norm_shape(config, heads, layer.head_dim), config.norm_eps, dtype, device)
                for heads in (layer.num_heads, layer.num_kv_heads)
            )
            if not self._norms_have_weights:
                self.q_norm.weight.fill_(1.0)
                self.k_norm.weight.fill_(1.0)
        self._norms_all_heads = config.qk_norm == "full"
        self._norms_after_rope = config.qk_norm_after_rope
        # What the kernels that start from the projection can do. They norm queries, and would undo a scaling before it.
        self._clip = config.qkv_clip
        self._fuses = (self.q_norm is None and self._clip is None) or (
            config.qk_norm in ("head", "unweighted")
            and self._clip is None
            and config.norm_kind == "rms"
            and not config.qk_norm_after_rope
            and (rope is None or rope.query_scaling is None)
        )
        self._interleaved = rope is not None and config.interleaved_rope
        self._pairs = 0 if rope is None else len(rope.inv_freq)

    def targets(self) -> Targets:
        names, sizes = self.names, [self._gate_size + self.query_size, self.key_size, self.key_size]
        qkv = self.qkv.targets(names.qkv, sizes if len(names.qkv) == 3 else [sum(sizes)])
        if self.gate is not None:
            qkv = self.gate.split_targets(qkv)
        yield from (self._unpaired(qkv, axis=0) if self._interleaved else qkv)
        yield from self.output.targets([names.output])
        if self.sinks is not None:
            yield "sinks", self.sinks
        if self.q_norm is not None and self.k_norm is not None and self._norms_have_weights:
            norms = chain(_norm_targets(names.q_norm, self.q_norm), _norm_targets(names.k_norm, self.k_norm))
            yield from (self._unpaired(norms, axis=-1) if self._interleaved else norms)

    def _unpaired(self, targets: Targets, axis: int) -> Targets:
        """Reorder the dimensions of queries and keys so that rotated pairs are in separate halves.

        Scores do not depend on the order of a head's dimensions. So all kernels need only one kind of rotation.
        """
        value_names = {f"{self.names.qkv[-1]}.weight", f"{self.names.qkv[-1]}.bias"}
        rotated = torch.arange(2 * self._pairs).view(-1, 2).T.flatten()
        order = torch.cat((rotated, torch.arange(2 * self._pairs, self.layer.head_dim)))
        for name, target in targets:
            yield name, target if name in value_names else PermutedHeads(target, order, axis)

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    def parts(self) -> Iterator[Part]:
        yield from (self.qkv, self.output)
        if self.q_norm is not None and self.k_norm is not None:
            yield from (self.q_norm, self.k_norm)
        if self.gate is not None:
            yield self.gate

    def __call__(self, x: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        projected = self.qkv(x)
        if self.gate is None:
            found = self._attend(projected, rotation, attend)
            return found if self._output_scale == 1.0 else found.mul_(self._output_scale)
        gate, qkv = projected.split((self._gate_size, projected.shape[1] - self._gate_size), dim=1)
        return self.gate(self._attend(qkv.contiguous(), rotation, attend), gate)

    def _attend(self, qkv: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        layer = self.layer
        if isinstance(attend, FusedAttend) and self._fuses:
            return self.attended(qkv, rotation, attend)
        heads = qkv.unflatten(-1, (-1, layer.head_dim))  # [T, heads + 2 * kv_heads, head_dim]
        qk, v = heads.split((layer.num_heads + layer.num_kv_heads, layer.num_kv_heads), dim=1)
        if not self._norms_after_rope:
            qk = self._normalised(qk)
        if self._clip is not None:
            qk, v = qk.clamp(-self._clip, self._clip), v.clamp(-self._clip, self._clip)
        if rotation is not None:
            rotate_(qk, rotation)  # queries and keys together
            if rotation.query_scale is not None:
                qk[:, : layer.num_heads].mul_(rotation.query_scale[..., None])
        if self._norms_after_rope:
            qk = self._normalised(qk)
        q, k = qk.split((layer.num_heads, layer.num_kv_heads), dim=1)
        return attend(layer, q, k, v, sinks=self.sinks).flatten(1)

    def attended(self, qkv: Tensor, rotation: Rotation | None, attend: FusedAttend) -> Tensor:
        """qkv [T, ...], the projection, which may be overwritten -> [T, query_size]."""
        if rotation is not None and rotation.query_scale is not None:
            qkv[:, : self.query_size].mul_(rotation.query_scale)
        heads = attend.from_projection(
            self.layer,
            qkv,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            cos=None if rotation is None or not self._pairs else rotation.cos,
            sin=None if rotation is None or not self._pairs else rotation.sin,
            sinks=self.sinks,
        )
        return heads.flatten(1)

    def _normalised(self, qk: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk.split((self.layer.num_heads, self.layer.num_kv_heads), dim=1)
        return torch.cat((self._normed_heads(q, self.q_norm), self._normed_heads(k, self.k_norm)), dim=1)

    def _normed_heads(self, heads: Tensor, norm: Norm) -> Tensor:
        return norm(heads.flatten(1)).view(heads.shape) if self._norms_all_heads else norm(heads)


class DecoderLayer:
    """Attention or a recurrent block, and a feed-forward block, with norms where the family has them.

    Each is added to the residual stream. A layer may also have attention and a recurrent block side by side.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
    ) -> None:
        self.rope = layer.rope
        self.names = config.names
        self.parallel = config.parallel_block
        self.experts = layer.experts
        self.recurrent, self._states = None, layer.recurrent
        self._attention = _attention(config, layer, dtype, device, format)
        if layer.mixer is not None:
            self.recurrent = layer.mixer.make(config.hidden_size, config.norm_eps, dtype, device, format)
        self.mixers = tuple(mixer for mixer in (self._attention, self.recurrent) if mixer is not None)
        self.mlp = _feed_forward(config, layer, dtype, device, format) if layer.intermediate_size else None
        names = config.layer_norms(layer)
        self.norms = {
            name: make_norm(config, config.hidden_size, config.stream_eps, dtype, device)
            for name in names
            if name is not None
        }
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else self.norms[name] for name in names
        )

    @property
    def attention(self) -> SelfAttention:
        """The attention of a layer that has it, with keys and values for each head."""
        assert isinstance(self._attention, SelfAttention)
        return self._attention

    def targets(self) -> Targets:
        if self._attention is not None:
            yield from prefixed(self.names.attention, self._attention.targets())
        if self.recurrent is not None:
            yield from prefixed(self.names.recurrent, self.recurrent.targets())
        for name, norm in self.norms.items():
            yield from norm.targets(name)
        if isinstance(self.mlp, MixtureOfExperts):
            assert self.experts is not None
            yield from _expert_targets(self.mlp, self.experts.names)
        elif self.mlp is not None:
            yield from prefixed(self.names.mlp, self.mlp.targets(self.names.inner, self.names.down))

    def linears(self) -> tuple[Linear, ...]:
        mixers = (linear for mixer in self.mixers for linear in mixer.linears())
        return *mixers, *(() if self.mlp is None else self.mlp.linears())

    def parts(self) -> Iterator[Part]:
        for mixer in self.mixers:
            yield from mixer.parts()
        yield from self.norms.values()
        if self.mlp is not None:
            yield self.mlp

    def __call__(
        self, x: Tensor, delta: Tensor | None, positions: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor | None:
        return self.rest(x, self.mixed(x, delta, rotation, attend), positions)

    def mixed(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation | None,
        attend: Attend,
        recurrent: RecurrentStep | None = None,
    ) -> tuple[Tensor, ...]:
        """Add `delta`, the output of the block before, to the residual stream `x` in place; return what each of the
        mixers makes of it, before their output projections."""
        normed = add_(x, delta, self.before_attention)
        found = [] if self._attention is None else [self._attention(normed, rotation, attend)]
        if self.recurrent is not None:
            assert recurrent is not None, "the model has recurrent layers"
            assert self._states is not None
            found.append(self.recurrent(normed, recurrent.batch, recurrent.storage.of(self._states)))
        return tuple(found)

    def rest(self, x: Tensor, mixed: tuple[Tensor, ...], positions: Tensor) -> Tensor | None:
        """Everything behind the mixers, row by row; returns what has still to be added to `x`.

        Adding late allows a sum and its norm to be one pass over the data.
        """
        normed = _normed(self.before_mlp, x).clone() if self.parallel else None
        delta: Tensor | None = None
        for mixer, inner in zip(self.mixers, mixed, strict=True):
            if delta is not None:
                x.add_(delta)
            delta = _project(mixer.output, inner, x, self.after_attention)
        if self.mlp is None:
            return delta
        if normed is None:
            normed = add_(x, delta, self.before_mlp)
        elif delta is not None:
            x.add_(delta)
        if isinstance(self.mlp, MixtureOfExperts):
            return _normed(self.after_mlp, self.mlp(normed, positions))
        return _project(self.mlp.down, self.mlp.inner(normed), x, self.after_mlp)


def add_(x: Tensor, delta: Tensor | None, norm: Norm | None) -> Tensor:
    """Add `delta` to `x` in place; return the sum, normed if there is a norm."""
    if delta is not None and norm is not None:
        return norm.add_(x, delta)
    if delta is not None:
        x.add_(delta)
    return _normed(norm, x)


def make_norm(
    config: DecoderConfig, size: int | tuple[int, int], eps: float, dtype: torch.dtype, device: torch.device
) -> Norm:
    kind: dict[str, Any] = {"unit_offset": config.norm_unit_offset, "dtype": dtype, "device": device}
    if config.norm_kind == "layer":
        return LayerNorm(size, eps, bias=config.norm_bias and isinstance(size, int), **kind)
    assert isinstance(size, int), "no family has a root-mean-square norm with weights of its own for each head"
    return RMSNorm(size, eps, **kind)


def _norm_targets(name: str, norm: Norm) -> Targets:
    if "{}" not in name:
        return norm.targets(name)
    return ((f"{name.format(head)}.weight", weight) for head, weight in enumerate(norm.weight))


def _norm_shape(config: DecoderConfig, heads: int, head_dim: int) -> int | tuple[int, int]:
    """The shape of a norm of queries or keys."""
    if config.qk_norm == "each":
        return heads, head_dim
    return heads * head_dim if config.qk_norm == "full" else head_dim


def _project(linear: Linear, y: Tensor, x: Tensor, norm: Norm | None) -> Tensor | None:
    """linear(y), which is to be added to `x`; None if it has been added already."""
    if norm is None and linear.adds_in_place(y):
        linear.add_to_(x, y)
        return None
    return _normed(norm, linear(y))


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _attention(
    config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device, format: type[WeightFormat]
) -> SelfAttention | LatentAttention | None:
    if layer.attention is None:
        return None
    if layer.latent is None:
        return SelfAttention(config, layer.attention, layer.rope, dtype, device, format)
    kind: dict[str, Any] = {"dtype": dtype, "device": device, "format": format}
    return LatentAttention(config.hidden_size, layer.attention, layer.latent, **kind)


def _feed_forward(
    config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device, format: type[WeightFormat]
) -> DenseMLP | MixtureOfExperts:
    if layer.experts is None:
        block = GatedMLP if config.gated_mlp else UngatedMLP
        return block(
            config.hidden_size,
            layer.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            format=format,
            multipliers=config.mlp_multipliers,
        )
    experts, hidden = layer.experts, config.hidden_size
    kind: dict[str, Any] = {"activation": config.activation, "dtype": dtype, "device": device}
    kind["has_gates"] = experts.names.gate is not None
    shared = None
    if experts.shared_size:
        is_gated = experts.names.shared_gate is not None
        shared = SharedExpert(hidden, experts.shared_size, is_gated=is_gated, format=format, **kind)
    return MixtureOfExperts(
        hidden,
        layer.intermediate_size,
        experts.routing,
        shared=shared,
        bias=experts.bias,
        latent_size=experts.latent_size,
        **kind | {"activation": experts.clamped_gate or config.activation},
    )


def _expert_targets(mlp: MixtureOfExperts, names: ExpertNames) -> Targets:
    router = mlp.router.targets(names.router, names.correction_bias, names.correction_bias_is_row)
    yield from prefixed(names.block, router)
    yield from prefixed(f"{names.block}.{names.experts}", mlp.expert_targets(names.inner, names.down))
    for name, linear in zip(names.latent, mlp.latent or (), strict=False):
        yield from prefixed(names.block, linear.targets([name]))
    if mlp.shared is not None:
        assert names.shared is not None
        shared = mlp.shared.targets(names.shared, names.shared_inner, names.shared_down, names.shared_gate or "")
        yield from (shared if names.shared_is_outside else prefixed(names.block, shared))
