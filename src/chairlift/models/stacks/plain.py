"""The layers one after the other, one operation at a time: runs every model with every attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.block_experts import BlockExperts
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.layers.moe import MixtureOfExperts
from chairlift.models.base import HiddenStates
from chairlift.models.decoder_layer import DecoderLayer, Delta, add_
from chairlift.models.self_attention import KeptKV
from chairlift.models.stacks.base import MANY_ROWS, LayerStack, StackParts, picked


def _in_blocks(layer: DecoderLayer) -> bool:
    """Whether all products of a layer are with blocks, except that of a router, which is small."""
    mixture = layer.mlp if isinstance(layer.mlp, MixtureOfExperts) else None
    routers = () if mixture is None else (mixture.router.linear,)
    linears = [linear for linear in layer.linears() if linear not in routers]
    experts = () if mixture is None else (mixture.gate_up, mixture.down)
    in_blocks = all(isinstance(each, BlockExperts) and each.in_blocks for each in experts)
    return in_blocks and all(isinstance(linear.weight, BlockWeight) for linear in linears)


class PlainStack(LayerStack):
    def __init__(self, parts: StackParts, *, has_own_threads: bool = False) -> None:
        """`has_own_threads`: products run on threads of their own, as the attention does."""
        super().__init__(parts)
        self.has_own_threads = has_own_threads

    def finalize(self) -> None:
        self.has_own_threads |= all(map(_in_blocks, self.parts.layers))

    def first(self, count: int) -> PlainStack:
        return PlainStack(self.parts.first(count), has_own_threads=self.has_own_threads)

    def __call__(
        self,
        batch: StepBatch,
        attention: StepAttention,
        taps: Sequence[int],
        rows: Tensor | None,
    ) -> HiddenStates:
        """In the last layer, rows that are not sampled only need K and V: the rest is computed for `rows` only.

        In a prompt that is one row, which saves 3% of its prefill in a model of 30 layers.
        """
        tokens, positions = batch.tokens, batch.positions
        late_rows = rows if self._drops_late(tokens, rows) else None
        rows = rows if late_rows is None else None
        layers = self.parts.layers
        rotations = self.parts.rotations(positions)
        x = self.parts.embedding(tokens)
        if batch.embeddings is not None:
            x = batch.embeddings.put_into(x)
        per_layer = self.parts.per_layer
        all_inputs = None if per_layer is None else per_layer(tokens, x)
        kept: KeptKV = {}
        delta: Delta | None = None
        inputs = {}
        for index, layer in enumerate(layers):
            if index in taps:
                inputs[index] = add_(x.clone(), delta, None)
            rotation = None if layer.rope is None else rotations[layer.rope]
            mixed = layer.mixed(x, delta, rotation, attention, batch.recurrent, kept)
            own_inputs = None if all_inputs is None else all_inputs[:, index]
            if layer is layers[-1] and rows is not None:
                x, positions = picked(x, rows), picked(positions, rows)
                mixed = tuple(picked(each, rows) for each in mixed)
                own_inputs = None if own_inputs is None else picked(own_inputs, rows)
            delta = layer.rest(x, mixed, positions, own_inputs) if len(x) else None  # a step may sample no row
        hidden = picked(add_(x, delta, self.parts.norm), late_rows)
        return HiddenStates(hidden, [inputs[index] for index in taps])

    def _drops_late(self, tokens: Tensor, rows: Tensor | None) -> bool:
        """Whether rows that are not sampled are dropped at the end, by one kernel: in small steps on a GPU. The experts
        of the last layer are weights that only few rows read, so that dropping many rows before them pays."""
        if rows is None or not on_gpu(tokens.device) or len(tokens) > MANY_ROWS:
            return False
        return 2 * len(rows) >= len(tokens) or not isinstance(self.parts.layers[-1].mlp, MixtureOfExperts)
