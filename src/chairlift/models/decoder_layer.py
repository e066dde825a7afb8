"""One layer of a decoder: attention or a recurrent block, and a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from chairlift.attention.interface import StepAttention
from chairlift.attention.recurrent import RecurrentStep
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import count_formats
from chairlift.layers.indexer import IndexChoice
from chairlift.layers.latent_attention import LatentAttention
from chairlift.layers.linear import Build, Linear
from chairlift.layers.mlp import DenseMLP, GatedMLP, UngatedMLP
from chairlift.layers.moe import MixtureOfExperts, SharedExpert
from chairlift.layers.norm import Norm
from chairlift.layers.parts import Part, Targets, add_prefix, present
from chairlift.layers.per_layer_input import PerLayerInput
from chairlift.layers.rope import Rope, Rotation
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.experts import ExpertNames, ExpertsConfig
from chairlift.models.self_attention import KeptKV, SelfAttention, make_norm


@dataclass(slots=True)
class LayerStep:
    """What the layers read in one step beside the residual stream."""

    attention: StepAttention
    positions: Tensor  # [T]
    rotations: Mapping[Rope, Rotation] = field(default_factory=dict)
    recurrent: RecurrentStep | None = None
    all_inputs: Tensor | None = None  # [T, layers, size]: those of single layers
    inputs: Tensor | None = None  # [T, size]: those of the layer that is running
    kept: KeptKV = field(default_factory=dict)
    choice: IndexChoice = field(default_factory=IndexChoice)
    mixed: Sequence[Tensor] = ()  # [T, ...] each: what the mixers of the layer made of the residual stream
    beside: Tensor | None = None  # [T, hidden]: what a feed-forward block beside the mixers reads
    pick_adapters: Callable[[Tensor], None] | None = None  # called with the only rows that are needed from now on

    def enter(self, layer: int) -> None:
        """Called before each layer, by its number."""
        self.inputs = None if self.all_inputs is None else self.all_inputs[:, layer]

    def pick(self, rows: Tensor) -> None:
        """Only these rows are needed from now on."""
        if self.pick_adapters is not None:
            self.pick_adapters(rows)
        self.positions = pick_rows(self.positions, rows)
        self.mixed = [pick_rows(each, rows) for each in self.mixed]
        self.inputs = None if self.inputs is None else pick_rows(self.inputs, rows)


class DecoderLayer(Part):
    """Attention or a recurrent block, and a feed-forward block, with norms where the family has them.

    Each is added to the residual stream. A layer may also have attention and a recurrent block side by side.
    """

    def __init__(self, config: DecoderConfig, layer: LayerConfig, build: Build) -> None:
        self.rope = layer.rope
        self.names = config.names
        self._experts, self._states = layer.experts, layer.recurrent
        self.self_attention: SelfAttention | None = None
        self.latent: LatentAttention | None = None
        if layer.attention is not None and layer.latent is not None:
            sparse: dict[str, Any] = {"index": layer.index, "shares_choice": layer.shares_choice}
            self.latent = LatentAttention(config.hidden_size, layer.attention, layer.latent, build, **sparse)
        elif layer.attention is not None:
            self.self_attention = SelfAttention(config, layer, build)
        self.recurrent = None
        if layer.mixer is not None:
            self.recurrent = layer.mixer.make(config.hidden_size, config.norm_eps, build)
        self.mixers = tuple(mixer for mixer in (self.self_attention, self.latent, self.recurrent) if mixer is not None)
        self.dense: DenseMLP | None = None
        self.mixture: MixtureOfExperts | None = None
        if layer.experts is not None and layer.intermediate_size:
            self.mixture = _make_mixture(config, layer.intermediate_size, layer.experts, build)
        elif layer.intermediate_size:
            options: dict[str, Any] = {"bias": config.mlp_bias, "multipliers": config.mlp_multipliers}
            block = GatedMLP if config.gated_mlp else UngatedMLP
            sizes = config.hidden_size, layer.intermediate_size
            self.dense = block(*sizes, build, activation=config.activation, **options)
        self.mlp: DenseMLP | MixtureOfExperts | None = self.mixture or self.dense
        names = config.layer_norms(layer)
        self.norms = {
            name: make_norm(config, config.hidden_size, config.stream_eps, build) for name in names if name is not None
        }
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else self.norms[name] for name in names
        )
        self.parallel = config.parallel_block and self.before_mlp is not None
        self.per_layer_input: PerLayerInput | None = None
        if config.per_layer_input_size:
            sizes = config.hidden_size, config.per_layer_input_size
            self.per_layer_input = PerLayerInput(*sizes, config.norm_eps, build, activation=config.activation)
        self.scalar = build.empty(1) if config.layer_scalars else None

    def __call__(self, x: Tensor, step: LayerStep, rows: Tensor | None = None) -> Tensor:
        """Add the output of each block to the residual stream x [T, hidden] in place; return it, or only `rows` of it.

        This is what a layer computes. Programs of fused operations (`fuse_cpu`, `fuse_gpu`) compute the same.
        """
        step.mixed = self.mix(_norm(x, self.before_attention), step)
        if rows is not None:
            x = pick_rows(x, rows)
            step.pick(rows)
            if not len(rows):  # a step may sample no row
                return x
        step.beside = _norm(x, self.before_mlp) if self.parallel else None
        for mixer, inner in zip(self.mixers, step.mixed, strict=True):
            x += _norm(mixer.output(inner), self.after_attention)
        if self.mlp is not None:
            normed = _norm(x, self.before_mlp) if step.beside is None else step.beside
            x += _norm(self.mlp(normed, step.positions), self.after_mlp)
        if self.per_layer_input is not None and step.inputs is not None:
            x += self.per_layer_input.norm(self.per_layer_input(x, step.inputs))
        return x if self.scalar is None else x.mul_(self.scalar)

    def mix(self, normed: Tensor, step: LayerStep) -> list[Tensor]:
        """What each mixer makes of the normed rows and those before them, in front of its output projection."""
        rotation = None if self.rope is None else step.rotations[self.rope]
        mixed = []
        if self.self_attention is not None:
            mixed.append(self.self_attention(normed, rotation, step.attention, step.kept))
        if self.latent is not None:
            mixed.append(self.latent(normed, rotation, step.attention, step.choice))
        if self.recurrent is not None:
            assert step.recurrent is not None, "the model has recurrent layers"
            assert self._states is not None
            states = step.recurrent.storage.of(self._states)
            mixed.append(self.recurrent(normed, step.recurrent.batch, states))
        return mixed

    @property
    def attention(self) -> SelfAttention:
        """The attention of a layer that has it, with keys and values for each head."""
        assert self.self_attention is not None
        return self.self_attention

    @property
    def in_blocks(self) -> bool:
        """Whether all products are with blocks, except that of a router, which is small."""
        mixture = self.mixture
        routers = () if mixture is None else (mixture.router.linear,)
        linears = [linear for linear in self.linears() if linear not in routers]
        experts = () if mixture is None else (mixture.gate_up, mixture.down)
        return all(each.in_blocks for each in experts) and all(linear.weight.panels is not None for linear in linears)

    def targets(self) -> Targets:
        for mixer in self.mixers:
            name = self.names.recurrent if mixer is self.recurrent else self.names.attention
            yield from add_prefix(name, mixer.targets())
        for name, norm in self.norms.items():
            yield from norm.targets(name)
        if self.mixture is not None:
            assert self._experts is not None
            yield from _expert_targets(self.mixture, self._experts.names)
        if self.dense is not None:
            yield from add_prefix(self.names.mlp, self.dense.targets(self.names.inner, self.names.down))
        if self.per_layer_input is not None:
            yield from self.per_layer_input.targets()
        if self.scalar is not None:
            yield "layer_scalar", self.scalar

    def parts(self) -> tuple[Part, ...]:
        return (*self.mixers, *self.norms.values(), *present(self.mlp, self.per_layer_input))


def _norm(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of `x`."""
    if not on_gpu(x.device):
        return x.index_select(0, rows)
    from chairlift.kernels.triton.launch import picked_rows

    return picked_rows(x, rows)


def _make_mixture(config: DecoderConfig, inner_size: int, experts: ExpertsConfig, build: Build) -> MixtureOfExperts:
    options: dict[str, Any] = {"has_gates": len(experts.names.inner) > 1}
    shared = None
    if experts.shared_size:
        sizes, is_gated = (config.hidden_size, experts.shared_size), experts.names.shared_gate is not None
        shared = SharedExpert(*sizes, build, is_gated=is_gated, activation=config.activation, **options)
    activation = experts.clamped_gate or config.activation
    options |= {"shared": shared, "bias": experts.bias, "latent_size": experts.latent_size, "activation": activation}
    return MixtureOfExperts(config.hidden_size, inner_size, experts.routing, build, **options)


def _expert_targets(mlp: MixtureOfExperts, names: ExpertNames) -> Targets:
    router = mlp.router.targets(names.router, names.correction_bias, names.correction_bias_is_row)
    yield from add_prefix(names.block, router)
    yield from add_prefix(f"{names.block}.{names.experts}", mlp.expert_targets(names.inner, names.down))
    for name, linear in zip(names.latent, mlp.latent or (), strict=False):
        yield from add_prefix(names.block, linear.targets([name]))
    if mlp.shared is not None:
        assert names.shared is not None
        shared = mlp.shared.targets(names.shared, names.shared_inner, names.shared_down, names.shared_gate or "")
        yield from (shared if names.shared_is_outside else add_prefix(names.block, shared))


def describe_formats(layers: Sequence[DecoderLayer], head: Linear) -> str:
    """How many linear maps have which format, in words."""
    linears = [linear for layer in layers for linear in layer.linears()]
    counts = count_formats([linear.weight for linear in (*linears, head)])
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    forms = {each.form for mixture in mixtures for each in (mixture.gate_up, mixture.down)} - {"plain"}
    return f"{counts}; experts: {', '.join(sorted(forms))}" if forms else counts
