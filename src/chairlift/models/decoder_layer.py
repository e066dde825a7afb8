"""One layer of a decoder: attention or a recurrent block, and a feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chairlift.attention.interface import StepAttention
from chairlift.attention.recurrent import RecurrentStep
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import WeightFormat, count_formats
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.latent_attention import LatentAttention
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import DenseMLP, GatedMLP, UngatedMLP
from chairlift.layers.moe import MixtureOfExperts, SharedExpert
from chairlift.layers.norm import Norm, RMSNorm, add_normed_
from chairlift.layers.parts import Part, Targets, prefixed
from chairlift.layers.per_layer_input import PerLayerInput
from chairlift.layers.rope import Rotation
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.experts import ExpertNames
from chairlift.models.self_attention import KeptKV, SelfAttention, make_norm


class Delta(NamedTuple):
    """What has still to be added to the residual stream. Adding late allows a sum and the norms around it to be one
    pass over the data."""

    output: Tensor  # of a block
    norm: Norm | None = None  # of the output
    scalar: Tensor | None = None  # a factor of the sum


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
        self.per_layer_input: PerLayerInput | None = None
        if config.per_layer_input_size:
            self.per_layer_input = PerLayerInput(
                config.hidden_size,
                config.per_layer_input_size,
                config.norm_eps,
                activation=config.activation,
                dtype=dtype,
                device=device,
                format=format,
            )
        self.scalar = torch.empty(1, dtype=dtype, device=device) if config.layer_scalars else None

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
        if self.per_layer_input is not None:
            yield from self.per_layer_input.targets()
        if self.scalar is not None:
            yield "layer_scalar", self.scalar

    def linears(self) -> tuple[Linear, ...]:
        mixers = (linear for mixer in self.mixers for linear in mixer.linears())
        further = (part.linears() for part in (self.mlp, self.per_layer_input) if part is not None)
        return *mixers, *chain(*further)

    def parts(self) -> Iterator[Part]:
        for mixer in self.mixers:
            yield from mixer.parts()
        yield from self.norms.values()
        yield from (part for part in (self.mlp, self.per_layer_input) if part is not None)

    def __call__(
        self, x: Tensor, delta: Delta | None, positions: Tensor, rotation: Rotation | None, attention: StepAttention
    ) -> Delta | None:
        return self.rest(x, self.mixed(x, delta, rotation, attention), positions)

    def mixed(
        self,
        x: Tensor,
        delta: Delta | None,
        rotation: Rotation | None,
        attention: StepAttention,
        recurrent: RecurrentStep | None = None,
        kept: KeptKV | None = None,
    ) -> tuple[Tensor, ...]:
        """Add `delta`, the output of the block before, to the residual stream `x` in place; return what each of the
        mixers makes of it, before their output projections."""
        normed = add_(x, delta, self.before_attention)
        found: list[Tensor] = []
        if isinstance(self._attention, SelfAttention):
            found.append(self._attention(normed, rotation, attention, kept))
        elif self._attention is not None:
            found.append(self._attention(normed, rotation, attention))
        if self.recurrent is not None:
            assert recurrent is not None, "the model has recurrent layers"
            assert self._states is not None
            found.append(self.recurrent(normed, recurrent.batch, recurrent.storage.of(self._states)))
        return tuple(found)

    def rest(
        self, x: Tensor, mixed: tuple[Tensor, ...], positions: Tensor, inputs: Tensor | None = None
    ) -> Delta | None:
        """Everything behind the mixers, row by row; returns what has still to be added to `x`.

        `inputs` [T, size]: those of this layer.
        """
        delta = self._fed_forward(x, mixed, positions)
        if self.per_layer_input is not None:
            assert inputs is not None
            delta = Delta(self.per_layer_input(add_(x, delta, None), inputs), self.per_layer_input.norm)
        if self.scalar is None:
            return delta
        if delta is not None:
            return delta._replace(scalar=self.scalar)
        x.mul_(self.scalar)
        return None

    def _fed_forward(self, x: Tensor, mixed: tuple[Tensor, ...], positions: Tensor) -> Delta | None:
        if self._adds_few_rows(x, mixed):
            self._add_few_rows(x, mixed[0], positions)
            return None
        normed = self.before_mlp(x) if self.parallel and self.before_mlp is not None else None
        delta: Delta | None = None
        for mixer, inner in zip(self.mixers, mixed, strict=True):
            add_(x, delta, None)
            delta = _project(mixer.output, inner, x, self.after_attention)
        if self.mlp is None:
            return delta
        if normed is None:
            normed = add_(x, delta, self.before_mlp)
        else:
            add_(x, delta, None)
        if isinstance(self.mlp, MixtureOfExperts):
            return Delta(self.mlp(normed, positions), self.after_mlp)
        return _project(self.mlp.down, self.mlp.inner(normed), x, self.after_mlp)

    def _adds_few_rows(self, x: Tensor, mixed: tuple[Tensor, ...]) -> bool:
        """Whether kernels for few rows add the output projection to `x`, and then the experts of the normed sum."""
        if len(mixed) != 1 or self.parallel or self.after_attention is not None or self.after_mlp is not None:
            return False
        if not isinstance(self.mlp, MixtureOfExperts) or not isinstance(self.before_mlp, RMSNorm):
            return False
        (mixer,) = self.mixers
        fuses = on_gpu(x.device) and mixer.output.weight.sums_squares(mixed[0])
        return fuses and self.mlp.adds_few_rows(x)

    def _add_few_rows(self, x: Tensor, inner: Tensor, positions: Tensor) -> None:
        from chairlift.kernels.triton.experts.few_rows import RowNorm

        (mixer,), norm = self.mixers, self.before_mlp
        assert isinstance(self.mlp, MixtureOfExperts)
        assert isinstance(norm, RMSNorm)
        squares = mixer.output.weight.fused(inner, add_to=x, bias=mixer.output.bias)[1]
        assert squares is not None
        self.mlp.add_few_rows(x, RowNorm(squares, norm.weight, norm.eps), positions)


def add_(x: Tensor, delta: Delta | None, norm: Norm | None) -> Tensor:
    """Add `delta` to `x` in place; return the sum, normed if there is a norm."""
    if delta is None:
        return x if norm is None else norm(x)
    return add_normed_(x, delta.output, norm, after=delta.norm, scalar=delta.scalar)


def _project(linear: Linear, y: Tensor, x: Tensor, norm: Norm | None) -> Delta | None:
    """norm(linear(y)), which is to be added to `x`; None if it has been added already."""
    if norm is None and linear.adds_in_place(y):
        linear.add_to_(x, y)
        return None
    return Delta(linear(y), norm)


def _attention(
    config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device, format: type[WeightFormat]
) -> SelfAttention | LatentAttention | None:
    if layer.attention is None:
        return None
    if layer.latent is None:
        return SelfAttention(config, layer, dtype, device, format)
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
        format=format,
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


def describe_formats(layers: Sequence[DecoderLayer], head: Linear) -> str:
    """How many linear maps have which format, in words."""
    linears = [linear for layer in layers for linear in layer.linears()]
    counts = count_formats([linear.weight for linear in (*linears, head)])
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, MixtureOfExperts)]
    forms = {each.form for mixture in mixtures for each in (mixture.gate_up, mixture.down)} - {"plain"}
    return f"{counts}; experts: {', '.join(sorted(forms))}" if forms else counts
