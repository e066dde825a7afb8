"""The layers of a decoder as operations on a residual stream, each in as few GPU kernels as its stream has for it.

Where the kernels have all operations of the layers, five for steps with few rows,

    norm + qkv | attention, with norms, rotation, cache write | output + add | norm + gate, up | down + add

of mixtures of experts six (norm + routing | gate, up | down + add at the end) for up to 8 rows,
and ten for steps with more rows whose products are in 8 bits. If all steps must add up in one order (batch invariance),
all have the few kernels. Other steps and layers have the additions in one kernel with the norms around them.

A norm divides a row by its size and multiplies each column by a weight. The weights are multiplied into the matrix that
follows when the model is loaded; the size of a row is computed by the kernel that writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.linear import Linear
from chairlift.layers.norm import Norm
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer, LayerStep
from chairlift.models.programs.base import LayerProgram, ModelParts
from chairlift.models.programs.streams import BlockNorms, FusedStream, PairedStream, RoundedStream, ScaledStream, Stream


def fuse(
    parts: ModelParts,
    format: type[WeightFormat],
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> GPUProgram:
    has_experts = any(layer.experts is not None for layer in parts.config.layers)
    one_order = format.traits.fuses_invariantly and not has_experts
    has_kernels = "norm" in format.traits.fuses and (one_order or not batch_invariant)
    return GPUProgram(parts, has_all_kernels=has_kernels and can_fuse(parts.config, dtype, device))


def can_fuse(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels have all operations of the layers."""
    norms = config.norms
    plain_norms = norms.before_attention and norms.before_mlp and not norms.after_attention and not norms.after_mlp
    if config.recurrent_layers:
        return False
    sizes = {config.hidden_size}
    for layer in config.layers:
        sizes |= {layer.intermediate_size, layer.only_attention.num_heads * layer.only_attention.head_dim}
    return bool(
        on_gpu(device)
        and dtype in (torch.bfloat16, torch.float16)
        and plain_norms
        and all(layer.latent is None for layer in config.layers)
        and config.activation == "silu"
        and not config.mlp_bias
        and config.norm_kind == "rms"
        and config.qk_norm in (None, "head")
        and not config.qk_norm_after_rope
        and not (config.qk_norm and config.scales_queries)
        and config.qkv_clip is None
        and config.has_usual_layers
        and config.gated_mlp
        and not config.parallel_block
        and not config.gated_attention
        and all(size % 16 == 0 for size in sizes)  # elements per load
    )


Operation = Callable[[Stream, LayerStep], None]
"""A part of a layer, which reads the residual stream and may add to it."""


def operations_of(layer: DecoderLayer, next_norm: Norm | None = None) -> list[Operation]:
    """A layer as operations, of which the first makes `LayerStep.mixed`; `next_norm` is that of the next layer."""
    first = BlockNorms(layer.before_attention, layer.after_attention, layer.before_mlp)
    second = BlockNorms(layer.before_mlp, layer.after_mlp, next_norm)
    attention, dense, mixture = layer.self_attention, layer.dense, layer.mixture
    own_input, scalar = layer.per_layer_input, layer.scalar
    with_norm = mixture if _may_have_norm(layer) else None  # experts whose kernels have the norm before them
    operations: list[Operation] = []
    if attention is not None and layer.mixers == (attention,):  # The product to queries, keys and values has the norm.

        def attend(stream: Stream, step: LayerStep) -> None:
            qkv = stream.product(layer.before_attention, attention.qkv)
            rotation = None if layer.rope is None else step.rotations[layer.rope]
            step.mixed = [attention.attend(qkv, rotation, step.attention, step.kept)]

        operations.append(attend)
    else:

        def mix(stream: Stream, step: LayerStep) -> None:
            step.mixed = layer.mix(stream.normed(layer.before_attention), step)

        operations.append(mix)
    if layer.parallel:  # The feed-forward block reads the same rows as the mixers.

        def norm_beside(stream: Stream, step: LayerStep) -> None:
            step.beside = stream.normed(layer.before_mlp)

        operations.append(norm_beside)
    for index, mixer in enumerate(layer.mixers):

        def project(stream: Stream, step: LayerStep, index: int = index, output: Linear = mixer.output) -> None:
            stream.add(output, step.mixed[index], first, with_norm)

        operations.append(project)
    if mixture is not None:
        operations.append(lambda stream, step: stream.add_experts(mixture, step.positions, second, step.beside))
    if dense is not None:
        operations.append(lambda stream, step: stream.add_dense(dense, second, step.beside))
    if own_input is not None:

        def add_input(stream: Stream, step: LayerStep) -> None:
            assert step.inputs is not None
            stream.add_late(own_input(stream.normed(None), step.inputs), own_input.norm)

        operations.append(add_input)
    if scalar is not None:
        operations.append(lambda stream, step: stream.scale(scalar))
    return operations


def _may_have_norm(layer: DecoderLayer) -> bool:
    """Whether one sum is in front of the feed-forward block, and nothing but a norm that kernels have between them."""
    norm, norms_behind = layer.before_mlp, layer.after_attention or layer.after_mlp
    return len(layer.mixers) == 1 and not layer.parallel and not norms_behind and norm is not None and not norm.centers


def fuse_layers(layers: Sequence[DecoderLayer], norm: Norm) -> Callable[[Tensor, LayerStep], Tensor]:
    """As `base.fuse_layers`."""
    operations = [operation for layer in layers for operation in operations_of(layer)]

    def run(x: Tensor, step: LayerStep) -> Tensor:
        stream = Stream(x)
        for operation in operations:
            operation(stream, step)
        return stream.final(norm)

    return run


class GPUProgram(LayerProgram):
    """Runs the operations on a stream that suits the number of rows."""

    def __init__(self, parts: ModelParts, *, has_all_kernels: bool) -> None:
        """`has_all_kernels`: streams with whole kernels can run the operations."""
        super().__init__(parts)
        self._has_all_kernels = has_all_kernels
        self._weights: list[WeightFormat] = []
        self._most_fused_rows, self._rounds_rows = -1, False
        self._norms_are_moved = True
        befores = [layer.before_attention for layer in parts.layers]
        # Behind the last layer it is any norm: the final norm reads the stream itself.
        self._layers = [*map(operations_of, parts.layers, [*befores[1:], befores[-1]])]

    def before_packing(self, layer: DecoderLayer) -> None:
        """Multiply the norms' weights into the matrices that follow them, where their format allows it; before experts
        they stay."""
        if not self._has_all_kernels:
            return
        followed = [(layer.before_attention, layer.attention.qkv)]
        if layer.dense is not None:
            followed.append((layer.before_mlp, layer.dense.first))
        for norm, linear in followed:
            assert norm is not None
            self._norms_are_moved &= norm.move_weight(linear.weight.scale_columns)

    def finalize(self) -> None:
        if not self._has_all_kernels:
            return
        self._weights = weights = [linear.weight for layer in self.parts.layers for linear in layer.linears()]
        self._most_fused_rows = min(weight.traits.fuses.get("norm", 0) for weight in weights)
        if all(weight.batch_invariant and weight.traits.fuses_invariantly for weight in weights):
            self._most_fused_rows = sys.maxsize  # one order of sums for all steps
        self._rounds_rows = self._norms_are_moved and all("rounded add" in weight.traits.fuses for weight in weights)

    def first(self, count: int) -> GPUProgram:
        program = GPUProgram(self.parts.first(count), has_all_kernels=self._has_all_kernels)
        program._norms_are_moved = self._norms_are_moved
        program.finalize()
        return program

    def __call__(
        self, batch: StepBatch, attention: StepAttention, taps: Sequence[int], rows: Tensor | None
    ) -> HiddenStates:
        stream = self._stream(batch)
        step = self.parts.step(batch, attention)
        if stream is None:
            stream = Stream(self.parts.embed(batch, step))
        inputs = {}
        for index, (mix, *following) in enumerate(self._layers):
            if index in taps:
                inputs[index] = stream.copy()
            step.enter(index)
            mix(stream, step)
            if index == len(self._layers) - 1 and rows is not None:
                stream.pick(rows, step, has_experts=self.parts.layers[-1].mixture is not None)
                if not len(stream.x):  # a step may sample no row
                    break
            for operation in following:
                operation(stream, step)
        return HiddenStates(stream.final(self.parts.norm), [inputs[index] for index in taps])

    def _stream(self, batch: StepBatch) -> Stream | None:
        """A stream whose kernels have all operations; None if there is none for this step."""
        if batch.embeddings is not None or batch.adapters is not None:  # squares are not known, or products have terms
            return None
        tokens = batch.tokens
        if len(tokens) <= self._most_fused_rows:
            x, squares = self.parts.embedding.with_squares(tokens)
            if self._norms_are_moved:
                splits = all(weight.fuses("pairs", len(x)) for weight in self._weights)
                return PairedStream(x, squares) if splits else FusedStream(x, squares)
            return ScaledStream(x, squares, self.parts.layers[0].before_attention)
        return RoundedStream(self.parts.embedding(tokens)) if self._rounds_rows else None
