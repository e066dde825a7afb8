"""The attention of a layer, from the residual stream to what its output projection reads."""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.interface import PlainProjection, Projection, StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.linear import Build
from chairlift.layers.norm import LayerNorm, Norm, RMSNorm
from chairlift.layers.parts import Part, PermutedHeads, Targets, present
from chairlift.layers.recurrent.base import GateOrder
from chairlift.layers.rope import Rotation, rotate_
from chairlift.layers.rows import row_by_row
from chairlift.models.config import DecoderConfig, LayerConfig

KeptKV = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of one step, by the index of their layer in the KV storage."""


class SelfAttention(Part):
    """Projects to queries, keys and values in one product, rotates them, and attends from them.

    The caller applies the output projection, because one kernel may do it together with the addition that follows.
    """

    def __init__(self, config: DecoderConfig, layer_config: LayerConfig, build: Build) -> None:
        layer, rope = layer_config.attention, layer_config.rope
        assert layer is not None
        self.layer = layer
        self._shares_kv, self._keeps_kv = layer_config.shares_kv, layer_config.keeps_kv
        self._num_keys = 0 if layer_config.shares_kv else layer.num_kv_heads
        self._num_values = 0 if layer_config.values_are_keys else self._num_keys
        self._v_norm_eps = config.norm_eps if config.v_norm else None
        self.names = config.names
        self.query_size = layer.num_heads * layer.head_dim
        self.key_size, self._value_size = (heads * layer.head_dim for heads in (self._num_keys, self._num_values))
        self.gate = OutputGate(layer.num_heads, layer.head_dim) if config.gated_attention else None
        self._output_scale = config.attention_output_scale
        self._gate_size = self.query_size if self.gate is not None else 0
        hidden = config.hidden_size
        both = self._gate_size + self.query_size + self.key_size + self._value_size
        self.qkv = build.linear(hidden, both, bias=config.qkv_bias)
        self.output = build.linear(self.query_size, hidden, bias=config.output_bias)
        # In float32, as the softmax that they are part of.
        self.sinks = build.empty(layer.num_heads, dtype=torch.float32) if layer.sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self._norms_have_weights = config.qk_norm != "unweighted"
        if config.qk_norm is not None and (self._norms_have_weights or (rope is not None and rope.inv_freq)):
            self.q_norm = _qk_norm(config, layer.num_heads, layer.head_dim, build)
            if not self._shares_kv:
                self.k_norm = _qk_norm(config, layer.num_kv_heads, layer.head_dim, build)
        if not self._norms_have_weights:
            for norm in (self.q_norm, self.k_norm):
                if norm is not None:
                    norm.weight.fill_(1.0)
        self._norms_all_heads = config.qk_norm == "full"
        self._norms_after_rope = config.qk_norm_after_rope
        # What the kernels that start from the projection can do. They norm queries, and would undo a scaling before it.
        self._clip = config.qkv_clip
        in_shared = self._norms_all_heads and (self._shares_kv or self._keeps_kv)
        usual_kind = config.qk_norm != "each" and not in_shared
        plain_norms = usual_kind and config.norm_kind == "rms" and not config.qk_norm_after_rope
        scales = rope is not None and rope.query_scaling is not None
        if self.q_norm is None:
            self._fuses = self._clip is None and not config.v_norm
        else:
            norms_values = config.v_norm and self._norms_all_heads
            self._fuses = self._clip is None and plain_norms and not scales and not norms_values
        self._interleaved = rope is not None and config.interleaved_rope
        self._pairs = 0 if rope is None else len(rope.inv_freq)

    def targets(self) -> Targets:
        names, sizes = self.names, [self._gate_size + self.query_size, self.key_size, self._value_size]
        if len(names.qkv) == 3:
            stored = {name: size for name, size in zip(names.qkv, sizes, strict=True) if size}
            qkv = self.qkv.targets(list(stored), list(stored.values()))
        else:
            qkv = self.qkv.targets(names.qkv, [sum(sizes)])
        if self.gate is not None:
            qkv = self.gate.split_targets(qkv)
        yield from (self._unpair(qkv, axis=0) if self._interleaved else qkv)
        yield from self.output.targets([names.output])
        if self.sinks is not None:
            yield "sinks", self.sinks
        if self._norms_have_weights:
            norms = chain(_norm_targets(names.q_norm, self.q_norm), _norm_targets(names.k_norm, self.k_norm))
            yield from (self._unpair(norms, axis=-1) if self._interleaved else norms)

    def _unpair(self, targets: Targets, axis: int) -> Targets:
        """Reorder the dimensions of queries and keys so that rotated pairs are in separate halves.

        Scores do not depend on the order of a head's dimensions. So all kernels need only one kind of rotation.
        """
        value_names = {f"{self.names.qkv[-1]}.weight", f"{self.names.qkv[-1]}.bias"}
        rotated = torch.arange(2 * self._pairs).view(-1, 2).T.flatten()
        order = torch.cat((rotated, torch.arange(2 * self._pairs, self.layer.head_dim)))
        for name, target in targets:
            yield name, target if name in value_names else PermutedHeads(target, order, axis)

    def parts(self) -> tuple[Part, ...]:
        return present(self.qkv, self.output, self.q_norm, self.k_norm, self.gate)

    def __call__(
        self, x: Tensor, rotation: Rotation | None, attention: StepAttention, kept: KeptKV | None = None
    ) -> Tensor:
        """`kept`: the step's keys and values that several layers read."""
        return self.attend(self.qkv(x), rotation, attention, kept)

    def attend(
        self, qkv: Tensor, rotation: Rotation | None, attention: StepAttention, kept: KeptKV | None = None
    ) -> Tensor:
        """From the product of the rows on, which may be overwritten."""
        if self.gate is not None:
            gate, qkv = qkv.split((self._gate_size, qkv.shape[1] - self._gate_size), dim=1)
            qkv = qkv.contiguous()
        heads, plain = partial(self.heads, qkv, rotation, kept), partial(self.plain, qkv, rotation)
        attended = attention.from_projection(self.layer, Projection(heads, plain, self.sinks)).flatten(1)
        if self.gate is not None:
            return self.gate(attended, gate)
        return attended if self._output_scale == 1.0 else attended.mul_(self._output_scale)

    def heads(
        self, qkv: Tensor, rotation: Rotation | None, kept: KeptKV | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, ...] -> queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim]."""
        layer = self.layer
        heads = qkv.unflatten(-1, (-1, layer.head_dim))  # [T, heads + 2 * kv_heads, head_dim]
        qk, v = heads.split((layer.num_heads + self._num_keys, self._num_values), dim=1)
        if self._num_values < self._num_keys:
            v = qk[:, layer.num_heads :].clone()
        if self.q_norm is not None and not self._norms_after_rope:
            qk = self._normalise(qk)
        if self._clip is not None:
            qk, v = qk.clamp(-self._clip, self._clip), v.clamp(-self._clip, self._clip)
        if self._v_norm_eps is not None and v.shape[1]:
            v = F.rms_norm(v.float(), v.shape[-1:], eps=self._v_norm_eps).to(v.dtype)
        if rotation is not None:
            rotate_(qk, rotation)  # queries and keys together
            if rotation.query_scale is not None:
                qk[:, : layer.num_heads].mul_(rotation.query_scale[..., None])
        if self.q_norm is not None and self._norms_after_rope:
            qk = self._normalise(qk)
        q, k = qk.split((layer.num_heads, self._num_keys), dim=1)
        if self._keeps_kv and kept is not None:
            kept[layer.index] = k, v
        if self._shares_kv:
            assert kept is not None
            k, v = kept[layer.index]  # stored a second time, in the same place
        return q, k, v

    def plain(self, qkv: Tensor, rotation: Rotation | None) -> PlainProjection | None:
        """qkv [T, ...] as a kernel norms and rotates it; None if it cannot."""
        if not self._fuses:
            return None
        if rotation is not None and rotation.query_scale is not None:
            qkv[:, : self.query_size].mul_(rotation.query_scale)
        q_norm, k_norm = self.q_norm, self.k_norm
        if self._norms_all_heads and q_norm is not None and k_norm is not None:
            from chairlift.kernels.triton.norms import norm_parts_

            norm_parts_(qkv, q_norm.weight, k_norm.weight, q_norm.eps)
            q_norm = k_norm = None
        return PlainProjection(
            qkv,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            cos=None if rotation is None or not self._pairs else rotation.cos,
            sin=None if rotation is None or not self._pairs else rotation.sin,
            v_norm=self._v_norm_eps is not None and not self._shares_kv,
        )

    def _normalise(self, qk: Tensor) -> Tensor:
        heads = qk.split((self.layer.num_heads, self._num_keys), dim=1)
        pairs = zip(heads, (self.q_norm, self.k_norm), strict=True)
        if self._norms_all_heads:
            return torch.cat([x if norm is None else norm(x.flatten(1)).view(x.shape) for x, norm in pairs], dim=1)
        return torch.cat([x if norm is None else norm(x) for x, norm in pairs], dim=1)


def make_norm(config: DecoderConfig, size: int | tuple[int, int], eps: float, build: Build) -> Norm:
    if config.norm_kind == "layer":
        bias = config.norm_bias and isinstance(size, int)
        return LayerNorm(size, eps, build, unit_offset=config.norm_unit_offset, bias=bias)
    assert isinstance(size, int), "no family has a root-mean-square norm with weights of its own for each head"
    return RMSNorm(size, eps, build, unit_offset=config.norm_unit_offset)


def _norm_targets(name: str, norm: Norm | None) -> Targets:
    if norm is None or "{}" not in name:
        return iter(()) if norm is None else norm.targets(name)
    return ((f"{name.format(head)}.weight", weight) for head, weight in enumerate(norm.weight))


def _qk_norm(config: DecoderConfig, heads: int, head_dim: int, build: Build) -> Norm:
    """A norm of queries or keys."""
    size: int | tuple[int, int] = heads * head_dim if config.qk_norm == "full" else head_dim
    return make_norm(config, (heads, head_dim) if config.qk_norm == "each" else size, config.norm_eps, build)


SIGMOID = GateOrder(norm=False, activation="sigmoid")


class OutputGate(Part):
    """Multiplies by the sigmoid of a projection, whose rows a checkpoint has beside those of the queries."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        heads = torch.arange(2 * num_heads * head_dim).view(num_heads, 2, head_dim)
        self._head_dim = head_dim
        self._order = torch.cat((heads[:, 1].flatten(), heads[:, 0].flatten()))

    def split_targets(self, targets: Targets) -> Targets:
        """Put the gates in front of the queries; the checkpoint has the query and the gate of each head together."""
        for name, target in targets:
            yield name, PermutedHeads(target, self._order, 0) if target.shape[0] == len(self._order) else target

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.gates import gated_norm

            return gated_norm(x, gate, None, self._head_dim, 0.0, SIGMOID)
        return row_by_row(torch.sigmoid, gate).mul_(x)
