"""Every layer of a decoder in few GPU kernels: five for steps with few rows,

    norm + qkv | attention, with norms, rotation, cache write | output + add | norm + gate, up | down + add

of mixtures of experts six (norm + routing | gate, up | down + add at the end) for up to 8 rows,
and ten for steps with more rows whose products are in 8 bits; other large steps run layer by layer. If all steps must
add up in one order (batch invariance), all have the few kernels.

A norm divides a row by its size and multiplies each column by a weight. The weights are multiplied into the matrix that
follows when the model is loaded; the size of a row is computed by the kernel that writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import Projection, StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.norm import Norm
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer
from chairlift.models.stacks.base import LayerStack, StackParts, picked
from chairlift.models.stacks.plain import PlainStack
from chairlift.models.stacks.streams import FusedStream, PairedStream, RoundedStream, ScaledStream, Stream


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


class FusedGPUStack(LayerStack):
    """Runs steps in the kernels of a stream that suits their number of rows, or layer by layer if there is none."""

    def __init__(self, parts: StackParts) -> None:
        super().__init__(parts)
        self._plain = PlainStack(parts)
        self._weights: list[WeightFormat] = []
        self._most_fused_rows, self._rounds_rows = 0, False
        self._norms_are_moved = True

    def before_packing(self, layer: DecoderLayer) -> None:
        """Multiply the norms' weights into the matrices that follow them, where their format allows it; before experts
        they stay."""
        followed = [(layer.before_attention, layer.attention.qkv)]
        if isinstance(layer.mlp, GatedMLP):
            followed.append((layer.before_mlp, layer.mlp.gate_up))
        for norm, linear in followed:
            assert norm is not None
            self._norms_are_moved &= norm.move_weight(linear.weight.scale_columns)

    def finalize(self) -> None:
        self._weights = weights = [linear.weight for layer in self.parts.layers for linear in layer.linears()]
        self._most_fused_rows = min(weight.most_fused_rows for weight in weights)
        if all(weight.batch_invariant and weight.fuses_invariantly for weight in weights):
            self._most_fused_rows = sys.maxsize  # one order of sums for all steps
        self._rounds_rows = self._norms_are_moved and all(weight.rounds_rows for weight in weights)

    def first(self, count: int) -> FusedGPUStack:
        stack = FusedGPUStack(self.parts.first(count))
        stack._norms_are_moved = self._norms_are_moved
        stack.finalize()
        return stack

    def __call__(
        self,
        batch: StepBatch,
        attention: StepAttention,
        taps: Sequence[int],
        rows: Tensor | None,
    ) -> HiddenStates:
        assert batch.recurrent is None, "layers with states are not fused"
        positions = batch.positions
        stream = self._stream(batch)
        if stream is None:
            return self._plain(batch, attention, taps, rows)
        rotations = self.parts.rotations(positions)
        inputs = {}
        for index, layer in enumerate(self.parts.layers):
            if index in taps:
                inputs[index] = stream.value().clone()
            own, mlp = layer.attention, layer.mlp
            rotation = None if layer.rope is None else rotations[layer.rope]
            qkv = stream.product(layer.before_attention, own.qkv)
            projection = Projection(partial(own.heads, qkv, rotation), partial(own.plain, qkv, rotation), own.sinks)
            attended = attention.from_projection(own.layer, projection).flatten(1)
            if layer is self.parts.layers[-1] and rows is not None:
                attended = stream.pick(rows, attended)
                positions = positions if len(attended) == len(positions) else picked(positions, rows)
            if not stream.num_rows:  # a step may sample no row
                continue
            stream.add_product(own.output, attended, layer.before_mlp)
            if isinstance(mlp, MixtureOfExperts):
                stream.add_experts(layer.before_mlp, mlp, positions, self._norm_after(index))
            else:
                assert isinstance(mlp, GatedMLP)
                stream.add_gated_products(layer.before_mlp, mlp, self._norm_after(index))
        return HiddenStates(stream.normed(self.parts.norm), [inputs[index] for index in taps])

    def _norm_after(self, index: int) -> Norm | None:
        """The norm that follows a layer; of the last layer any, since the final norm reads the stream itself."""
        return self.parts.layers[min(index + 1, len(self.parts.layers) - 1)].before_attention

    def _stream(self, batch: StepBatch) -> Stream | None:
        if batch.embeddings is not None:  # their squares are not known
            return None
        tokens = batch.tokens
        if len(tokens) <= self._most_fused_rows:
            x, squares = self.parts.embedding.with_squares(tokens)
            if self._norms_are_moved:
                return PairedStream(x, squares) if self._splits_rows(len(x)) else FusedStream(x, squares)
            return ScaledStream(x, squares, self.parts.layers[0].before_attention)
        return RoundedStream(self.parts.embedding(tokens)) if self._rounds_rows else None

    def _splits_rows(self, rows: int) -> bool:
        return all(weight.splits_rows(rows) for weight in self._weights)
