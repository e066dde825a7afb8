"""Every layer of a decoder in five GPU kernels, for steps with few rows.

    norm + qkv | attention, with norms, rotation, cache write | output + add | norm + gate, up | down + add

A norm divides a row by its size and multiplies each column by a weight. The weights are multiplied into the matrix that
follows when the model is loaded; the size of a row is computed by the kernel that writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.interface import Attend, FusedAttend
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.mlp import gated as gate
from chairlift.layers.norm import RMSNorm
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.stacks.base import LayerStack, StackParts, picked
from chairlift.models.stacks.plain import PlainStack

MOST_ROWS = 256  # with more rows the products take so long that fusing what is between them gains little


def can_fuse(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels have all operations of the layers."""
    norms = config.norms
    plain_norms = norms.before_attention and norms.before_mlp and not norms.after_attention and not norms.after_mlp
    sizes = {config.hidden_size}
    for layer in config.layers:
        sizes |= {layer.intermediate_size, layer.attention.num_heads * layer.attention.head_dim}
    return bool(
        on_gpu(device)
        and dtype in (torch.bfloat16, torch.float16)
        and plain_norms
        and all(layer.experts is None for layer in config.layers)
        and config.activation == "silu"
        and not config.output_bias
        and not config.mlp_bias
        and config.qk_norm != "full"
        and all(size % 16 == 0 for size in sizes)  # elements per load
    )


class FusedGPUStack(LayerStack):
    """Runs steps of up to MOST_ROWS rows in fused kernels, and larger ones layer by layer."""

    def __init__(self, parts: StackParts) -> None:
        super().__init__(parts)
        self._plain = PlainStack(parts)

    def finalize(self) -> None:
        """Multiply the norms' weights into the matrices that follow them."""
        for layer in self.parts.layers:
            assert isinstance(layer.mlp, GatedMLP)
            for norm, linear in ((layer.before_attention, layer.attention.qkv), (layer.before_mlp, layer.mlp.gate_up)):
                assert norm is not None
                assert linear.weight.plain is not None
                linear.weight.plain.mul_(norm.weight)
                norm.weight.fill_(1.0)

    def first(self, count: int) -> FusedGPUStack:
        return FusedGPUStack(self.parts.first(count))

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], rows: Tensor | None
    ) -> HiddenStates:
        if not isinstance(attend, FusedAttend) or len(tokens) > MOST_ROWS:
            return self._plain(tokens, positions, attend, taps, rows)
        rotations = self.parts.rotations(positions)
        x, squares = self.parts.embedding.with_squares(tokens)
        stream = _Stream(x, squares)
        inputs = {}
        for index, layer in enumerate(self.parts.layers):
            if index in taps:
                inputs[index] = x.clone()
            attention, mlp = layer.attention, layer.mlp
            assert isinstance(mlp, GatedMLP)
            rotation = None if layer.rope is None else rotations[layer.rope]
            attended = attention.attended(stream.product(layer.before_attention, attention.qkv), rotation, attend)
            stream.add_product(attention.output, attended, layer.before_mlp)
            inner = stream.product(layer.before_mlp, mlp.gate_up, gated=True)
            stream.add_product(mlp.down, inner, layer.before_attention)
        tapped = torch.stack([inputs[index] for index in taps]) if taps else None
        return HiddenStates(self.parts.norm(picked(x, rows)), tapped)


class _Stream:
    """The residual stream, with what its next norm needs: the rows' sums of squares, or the norm itself."""

    def __init__(self, x: Tensor, squares: Tensor) -> None:
        self.x = x
        self.squares: Tensor | None = squares
        self.normed: Tensor | None = None

    def product(self, norm: RMSNorm | None, linear: Linear, *, gated: bool = False) -> Tensor:
        """The normed stream times a weight."""
        from chairlift.kernels.triton.products.product import product
        from chairlift.kernels.triton.products.tiling import is_faster

        assert norm is not None
        assert linear.weight.plain is not None
        columns = linear.out_features // (2 if gated else 1)
        if is_faster(len(self.x), columns, linear.in_features, gated):
            x = self.x if self.normed is None else self.normed
            return product(x, linear.weight.plain, squares=self.squares, eps=norm.eps, bias=linear.bias, gated=gated)[0]
        found = linear(norm(self.x) if self.normed is None else self.normed)
        return gate(found, F.silu) if gated else found

    def add_product(self, linear: Linear, y: Tensor, next_norm: RMSNorm | None) -> None:
        """Add y times a weight."""
        from chairlift.kernels.triton.products.product import product
        from chairlift.kernels.triton.products.tiling import is_faster

        assert next_norm is not None
        assert linear.weight.plain is not None
        self.squares = self.normed = None
        if is_faster(len(y), linear.out_features, linear.in_features, gated=False):
            self.squares = product(y, linear.weight.plain, add_to=self.x)[1]
        else:  # all norms inside the layers have weights of one by now
            self.normed = next_norm.add_(self.x, linear(y))
