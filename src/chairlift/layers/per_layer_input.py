"""Inputs of single layers: every token has an embedding for each layer, added at its end (Gemma 4)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import Fusion
from chairlift.layers.linear import Build
from chairlift.layers.mlp import ACTIVATIONS, KERNEL_NAMES
from chairlift.layers.norm import RMSNorm
from chairlift.layers.parts import Part, Targets
from chairlift.layers.rows import row_by_row


class PerLayerEmbedding(Part):
    """The inputs of all layers: a row of a table, and a product of the token's usual embedding."""

    def __init__(self, vocab_size: int, num_layers: int, size: int, hidden_size: int, eps: float, build: Build) -> None:
        self.table = build.empty(vocab_size, num_layers * size)
        self.projection = build.linear(hidden_size, num_layers * size)
        self.norm = RMSNorm(size, eps, build)
        self._shape = (num_layers, size)
        self._scale = hidden_size**-0.5
        self._dtype = build.dtype

    def targets(self) -> Targets:
        yield "embed_tokens_per_layer.weight", self.table
        yield from self.projection.targets(["per_layer_model_projection"])
        yield from self.norm.targets("per_layer_projection_norm")

    def parts(self) -> tuple[Part, ...]:
        return self.projection, self.norm

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.table.nbytes

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """tokens [T], their embeddings [T, hidden] -> [T, layers, size]."""
        projected = self.projection(embedded)
        stored_scale, scale = self._shape[1] ** 0.5, 0.5**0.5
        if on_gpu(tokens.device):
            from chairlift.kernels.triton.norms import per_layer_inputs_

            scales = {"projected_scale": self._scale, "stored_scale": stored_scale, "scale": scale}
            per_layer_inputs_(tokens, self.table, projected, self.norm.weight, self.norm.eps, **scales)
            return projected.view(-1, *self._shape)
        stored = F.embedding(tokens, self.table).to(self._dtype).unflatten(-1, self._shape)
        projected = self.norm((projected * self._scale).unflatten(-1, self._shape))
        return projected.add_(stored, alpha=stored_scale).mul_(scale)


class PerLayerInput(Part):
    """The end of a layer: norm(projection(activation(gate(x)) * input)), which the caller adds to the residual stream.

    The caller applies the norm, because one kernel does it together with the addition.
    """

    def __init__(self, hidden_size: int, size: int, eps: float, build: Build, *, activation: str) -> None:
        self.gate = build.linear(hidden_size, size)
        self.projection = build.linear(size, hidden_size)
        self.norm = RMSNorm(hidden_size, eps, build)
        self._activation = ACTIVATIONS[activation]

    def targets(self) -> Targets:
        yield from self.gate.targets(["per_layer_input_gate"])
        yield from self.projection.targets(["per_layer_projection"])
        yield from self.norm.targets("post_per_layer_input_norm")

    def parts(self) -> tuple[Part, ...]:
        return self.gate, self.projection, self.norm

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x [T, hidden], inputs [T, size] -> what is added to `x`, before its norm."""
        if self._activation in KERNEL_NAMES and self.gate.fuses("activation", len(x)):
            behind = Fusion(activation=KERNEL_NAMES[self._activation], times=inputs)
            return self.projection(self.gate.weight.product(x, behind).rows)
        gate = self.gate(x)
        return self.projection(row_by_row(self._activation, gate).mul_(inputs))
