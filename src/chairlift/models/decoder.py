"""The decoder: one implementation, shaped by a DecoderConfig, for all families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.base import Attend, AttentionLayer, FusedAttend, HostAttend
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.norm import RMSNorm
from chairlift.layers.rope import RotaryEmbedding, Rotation, rotate_
from chairlift.layers.rows import one_by_one
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig, ExpertNames, LayerConfig
from chairlift.models.weights import EMBEDDING, HEAD

if TYPE_CHECKING:  # numba takes its time
    from chairlift.models.fused_cpu import FusedCPUDecoder, LayerWeights
    from chairlift.models.fused_gpu import FusedGPUDecoder

Targets = Iterator[tuple[str, Tensor]]  # the checkpoint's name of a tensor, and where it goes


class SelfAttention:
    """Projects to queries, keys and values in one product, rotates them, and leaves the rest to `attend`. The output
    projection is the caller's to apply, because it may be one with the addition that follows."""

    def __init__(self, config: DecoderConfig, layer: AttentionLayer, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self.fused_names = config.fused_names
        self.query_size = layer.num_heads * layer.head_dim
        self.key_size = layer.num_kv_heads * layer.head_dim
        self.qkv = Linear.empty(
            config.hidden_size,
            self.query_size + 2 * self.key_size,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear.empty(
            self.query_size, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm is not None:
            full = config.qk_norm == "full"
            self.q_norm = _norm(config, self.query_size if full else layer.head_dim, dtype, device)
            self.k_norm = _norm(config, self.key_size if full else layer.head_dim, dtype, device)

    def targets(self) -> Targets:
        if self.fused_names:
            yield from _linear_targets(self.qkv, "qkv_proj")
        else:
            sizes = (self.query_size, self.key_size, self.key_size)
            yield from _split_targets(self.qkv, ("q_proj", "k_proj", "v_proj"), sizes)
        yield from _linear_targets(self.output, "o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield "q_norm.weight", self.q_norm.weight
            yield "k_norm.weight", self.k_norm.weight

    def parts(self) -> Iterator[Linear | RMSNorm]:
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
            rotate_(qk, rotation)  # queries and keys in one go
        q, k = qk.split((layer.num_heads, layer.num_kv_heads), dim=1)
        return attend(layer, q, k, v).flatten(1)

    @property
    def _norms_all_heads(self) -> bool:
        return self.q_norm is not None and len(self.q_norm.weight) != self.layer.head_dim

    def attended(self, qkv: Tensor, rotation: Rotation | None, attend: FusedAttend) -> Tensor:
        """qkv [T, ...], the projection, which is used up -> [T, query_size]."""
        heads = attend.from_projection(
            self.layer,
            qkv,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            cos=None if rotation is None else rotation.cos,
            sin=None if rotation is None else rotation.sin,
        )
        return heads.flatten(1)

    def _normalised(self, qk: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """Normalise per head, or over all heads at once: the norm's own size tells which."""
        q, k = qk.split((self.layer.num_heads, self.layer.num_kv_heads), dim=1)
        q = q_norm(q.reshape(len(q), -1, len(q_norm.weight))).reshape(q.shape)
        k = k_norm(k.reshape(len(k), -1, len(k_norm.weight))).reshape(k.shape)
        return torch.cat((q, k), dim=1)


class DecoderLayer:
    """Attention and a feed-forward block, each added to what came before, with norms where the family has them."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.rope = layer.rope
        self.fused_names = config.fused_names
        self.experts = layer.experts
        self.attention = SelfAttention(config, layer.attention, dtype, device)
        self.mlp = _feed_forward(config, layer, dtype, device)
        names = config.norms
        self.norms = {
            name: _norm(config, config.hidden_size, dtype, device)
            for name in (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
            if name is not None
        }
        self.before_attention = self.norms.get(names.before_attention or "")
        self.after_attention = self.norms.get(names.after_attention or "")
        self.before_mlp = self.norms.get(names.before_mlp or "")
        self.after_mlp = self.norms.get(names.after_mlp or "")

    def targets(self) -> Targets:
        yield from _prefixed("self_attn", self.attention.targets())
        yield from ((f"{name}.weight", norm.weight) for name, norm in self.norms.items())
        if isinstance(self.mlp, MixtureOfExperts):
            assert self.experts is not None
            yield from _prefixed(self.experts.names.block, _expert_targets(self.mlp, self.experts.names))
        else:
            yield from _prefixed("mlp", _mlp_targets(self.mlp, self.fused_names))

    def linears(self) -> Iterator[Linear]:
        assert isinstance(self.mlp, GatedMLP), "experts are not rounded"
        yield from (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down)

    def parts(self) -> Iterator[Linear | RMSNorm | GatedMLP | MixtureOfExperts]:
        yield from self.attention.parts()
        yield from self.norms.values()
        yield self.mlp

    def __call__(
        self, x: Tensor, delta: Tensor | None, positions: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor | None:
        return self.rest(x, self.attended(x, delta, rotation, attend), positions)

    def attended(self, x: Tensor, delta: Tensor | None, rotation: Rotation | None, attend: Attend) -> Tensor:
        """Adds `delta`, the block before's output, to the residual stream `x` in place; returns what its own attention
        makes of that."""
        return self.attention(_add_(x, delta, self.before_attention), rotation, attend)

    def rest(self, x: Tensor, attended: Tensor, positions: Tensor) -> Tensor | None:
        """All that follows the attention, each row by itself; returns what is left to be added to `x`. Adding late lets
        a sum and the norm of it be one pass over the data."""
        delta = _project(self.attention.output, attended, x, self.after_attention)
        normed = _add_(x, delta, self.before_mlp)
        if isinstance(self.mlp, MixtureOfExperts):
            return _maybe(self.after_mlp, self.mlp(normed, positions))
        return _project(self.mlp.down, self.mlp.inner(normed), x, self.after_mlp)


class Decoder:
    """Embedding, layers, final norm, head. Built with empty weights; see `targets` and `finalize`."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, quantization: str = "none"
    ) -> None:
        self.config = config
        self.quantization = quantization
        self.vocab_size = config.vocab_size
        self.max_len = config.max_len
        self.attention_layers = config.attention_layers
        self.dtype = dtype
        self.device = device
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        # Rounded to the model's precision, as in training.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self.layers = [DecoderLayer(config, layer, dtype, device) for layer in config.layers]
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.rotary = {rope: RotaryEmbedding(rope, dtype=dtype, device=device) for rope in ropes}
        self.norm = _norm(config, config.hidden_size, dtype, device)
        if config.tied_head:
            self.head = Linear(self.embedding, shared=True)
        else:
            self.head = Linear.empty(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        self.batch_invariant = False
        self.taps: tuple[int, ...] = ()  # layers whose input `hidden_states` returns as well
        self._fused: FusedCPUDecoder | None = None
        self._fused_gpu: FusedGPUDecoder | None = None
        self._layer_weights: LayerWeights | None = None
        self._missing: list[int] = []  # how many targets of each layer are still to be filled
        if quantization != "none":
            self._prepare_rounding()

    def _prepare_rounding(self) -> None:
        self._missing = [sum(1 for _ in layer.targets()) for layer in self.layers]
        if self.quantization == "int8":
            from chairlift.models.fused_cpu import LayerWeights, can_fuse

            if can_fuse(self.config):
                self._layer_weights = LayerWeights(self.config)

    def targets(self) -> Targets:
        """Every tensor a checkpoint must hold, and the part of the model that it fills."""
        yield EMBEDDING, self.embedding
        for index, layer in enumerate(self.layers):
            yield from _prefixed(f"layers.{index}", layer.targets())
        yield "norm.weight", self.norm.weight
        if not self.config.tied_head:
            assert self.head.weight is not None
            yield HEAD, self.head.weight

    def tap(self, layers: Iterable[int]) -> None:
        """Return the inputs of these layers as well, in addition to those tapped before."""
        self.taps = tuple(sorted({*self.taps, *layers}))

    def first_layers(self, count: int) -> Decoder:
        """A model of the first `count` layers, which shares all weights with this one."""
        model = copy(self)
        model.layers, model.taps = self.layers[:count], ()
        if self._fused is not None:
            from chairlift.models.fused_cpu import FusedCPUDecoder

            assert self._layer_weights is not None
            model._fused = FusedCPUDecoder(self.config, model.layers, self.norm, self._layer_weights)
        if self._fused_gpu is not None:
            from chairlift.models.fused_gpu import FusedGPUDecoder

            model._fused_gpu = FusedGPUDecoder(model.layers)
        return model

    def make_batch_invariant(self) -> None:
        """From now on a token's numbers are the same, bit for bit, whatever else is computed in the same step."""
        self.batch_invariant = True
        for part in (*self._parts(), *self.rotary.values()):
            if isinstance(part, (GatedMLP, MixtureOfExperts)):
                part.make_batch_invariant()
            elif isinstance(part, (Linear, RotaryEmbedding)):
                part.batch_invariant = True

    def filled(self, name: str) -> None:
        """Call after each target is filled: a layer that is complete is rounded at once, if the model is to be, so
        that memory never holds all of it in full precision."""
        if not self._missing or not name.startswith("layers."):
            return
        index = int(name.split(".")[1])
        self._missing[index] -= 1
        if self._missing[index] > 0:
            return
        if self._layer_weights is not None:
            self._layer_weights.take(index, self.layers[index])
        else:
            for linear in self.layers[index].linears():
                linear.round() if self.quantization == "int8" else linear.round_to_floats()

    def finalize(self) -> None:
        """Call once every target is filled. One part after the other, so that memory never holds two models."""
        if self.quantization == "int8":
            self.head.round()
            self.embedding = self.embedding.half()  # far finer than 8 bits, and half the memory
        for part in self._parts():
            part.finalize()
        if self.quantization == "fp8" and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the plain weights took is free for the KV cache
        if self._layer_weights is not None:
            from chairlift.models.fused_cpu import FusedCPUDecoder

            self._fused = FusedCPUDecoder(self.config, self.layers, self.norm, self._layer_weights)
        if self.quantization == "none" and not self.batch_invariant:
            self._fuse_on_gpu()

    def _fuse_on_gpu(self) -> None:
        from chairlift.models.fused_gpu import FusedGPUDecoder, can_fuse

        if can_fuse(self.config, self.dtype, self.device):
            FusedGPUDecoder.move_norms_into(self.layers)
            self._fused_gpu = FusedGPUDecoder(self.layers)

    def _parts(self) -> Iterator[Linear | RMSNorm | GatedMLP | MixtureOfExperts]:
        for layer in self.layers:
            yield from layer.parts()
        yield self.norm
        yield self.head

    @property
    def brings_threads(self) -> bool:
        return self._fused is not None

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden], what the first layer reads."""
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _embed_with_squares(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        from chairlift.kernels.triton.layers import embed

        return embed(tokens, self.embedding, self.embedding_scale)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> HiddenStates:
        """Run all layers and the final norm.

        In the last layer, rows that are not sampled only need K and V: the rest is computed for `rows` only. In a
        prompt that is one row, which saves 3% of its prefill in a model of 30 layers.
        """
        rotations = {rope: rotary(positions) for rope, rotary in self.rotary.items()}
        if self._fused_gpu is not None and isinstance(attend, FusedAttend) and len(tokens) <= self._fused_gpu.most_rows:
            x, tapped = self._fused_gpu(*self._embed_with_squares(tokens), rotations, attend, self.taps)
            return HiddenStates(self.norm(_picked(x, rows)), tapped)
        x = self.embed(tokens)
        if self._fused is not None and isinstance(attend, HostAttend):
            return HiddenStates(*self._fused(x, rotations, attend, self.taps, rows))
        delta: Tensor | None = None
        inputs = {}
        for index, layer in enumerate(self.layers):
            if index in self.taps:
                inputs[index] = x.clone() if delta is None else x + delta
            attended = layer.attended(x, delta, None if layer.rope is None else rotations[layer.rope], attend)
            if layer is self.layers[-1]:
                x, attended, positions = (_picked(each, rows) for each in (x, attended, positions))
            delta = layer.rest(x, attended, positions) if len(x) else None  # no row is left of a step without samples
        tapped = torch.stack([inputs[index] for index in self.taps]) if self.taps else None
        return HiddenStates(_add_(x, delta, self.norm), tapped)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        if cap is None:
            return logits
        shares = logits.float() / cap
        return (one_by_one(torch.tanh, shares) if self.batch_invariant else torch.tanh(shares)) * cap

    def num_weight_bytes(self) -> int:
        return self.embedding.nbytes + sum(part.num_bytes for part in self._parts())


def _project(linear: Linear, y: Tensor, x: Tensor, norm: RMSNorm | None) -> Tensor | None:
    """What `linear` makes of `y`, which is to be added to `x`; None if it has been added already."""
    if norm is None and linear.adds_in_place(y):
        linear.add_to_(x, y)
        return None
    return _maybe(norm, linear(y))


def _add_(x: Tensor, delta: Tensor | None, norm: RMSNorm | None) -> Tensor:
    """Adds `delta` to `x` in place; returns the sum, normed if there is a norm."""
    if delta is not None and norm is not None:
        return norm.add_(x, delta)
    if delta is not None:
        x.add_(delta)
    return _maybe(norm, x)


def _picked(x: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return x
    if not x.is_cuda:
        return x.index_select(0, rows)
    from chairlift.kernels.triton.launch import picked_rows

    return picked_rows(x, rows)


def _maybe(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _norm(config: DecoderConfig, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, unit_offset=config.norm_unit_offset, dtype=dtype, device=device)


def _feed_forward(
    config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device
) -> GatedMLP | MixtureOfExperts:
    if layer.experts is None:
        return GatedMLP(
            config.hidden_size,
            layer.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
    return MixtureOfExperts(
        config.hidden_size,
        layer.intermediate_size,
        num_experts=layer.experts.num_experts,
        top_k=layer.experts.top_k,
        normalize=layer.experts.normalize,
        activation=config.activation,
        dtype=dtype,
        device=device,
    )


def _prefixed(prefix: str, targets: Targets) -> Targets:
    return ((f"{prefix}.{name}", target) for name, target in targets)


def _linear_targets(linear: Linear, name: str) -> Targets:
    return _split_targets(linear, (name,), (linear.out_features,))


def _split_targets(linear: Linear, names: tuple[str, ...], sizes: tuple[int, ...]) -> Targets:
    """The rows of a fused linear map that belong to each of its parts."""
    assert linear.weight is not None
    for name, weight in zip(names, linear.weight.split(sizes), strict=True):
        yield f"{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, linear.bias.split(sizes), strict=True):
            yield f"{name}.bias", bias


def _mlp_targets(mlp: GatedMLP, fused_names: bool) -> Targets:
    if fused_names:
        yield from _linear_targets(mlp.gate_up, "gate_up_proj")
    else:
        half = mlp.gate_up.out_features // 2
        yield from _split_targets(mlp.gate_up, ("gate_proj", "up_proj"), (half, half))
    yield from _linear_targets(mlp.down, "down_proj")


def _expert_targets(experts: MixtureOfExperts, names: ExpertNames) -> Targets:
    yield from _linear_targets(experts.router, "gate")
    for index, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        gate, up = gate_up.chunk(2)
        yield f"experts.{index}.{names.gate}.weight", gate
        yield f"experts.{index}.{names.up}.weight", up
        yield f"experts.{index}.{names.down}.weight", down
