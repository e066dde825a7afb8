"""The layers of a decoder on a GPU in five kernels each, for steps with few rows.

    norm + qkv | attention, with norms, rotation, cache write | output + add | norm + gate, up | down + add

A norm divides a row by its size and multiplies each column by a weight. The weights become part of the matrix that
follows when the model is loaded; the size of a row is known to the kernel that wrote it last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.base import FusedAttend
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.mlp import gated as gate
from chairlift.layers.norm import RMSNorm
from chairlift.layers.rope import Rope, Rotation
from chairlift.models.config import DecoderConfig

if TYPE_CHECKING:
    from chairlift.models.decoder import DecoderLayer

MOST_ROWS = 256  # with more of them the products take so long that what stands between them hardly counts


def can_fuse(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the layers are made of what the kernels know."""
    norms = config.norms
    plain_norms = norms.before_attention and norms.before_mlp and not norms.after_attention and not norms.after_mlp
    sizes = {config.hidden_size}
    for layer in config.layers:
        sizes |= {layer.intermediate_size, layer.attention.num_heads * layer.attention.head_dim}
    return bool(
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and plain_norms
        and all(layer.experts is None for layer in config.layers)
        and config.activation == "silu"
        and not config.output_bias
        and not config.mlp_bias
        and config.qk_norm != "full"
        and all(size % 16 == 0 for size in sizes)  # what the kernels load at once
    )


class FusedGPUDecoder:
    most_rows = MOST_ROWS

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = layers

    @staticmethod
    def move_norms_into(layers: Sequence[DecoderLayer]) -> None:
        """Multiply the norms' weights into the matrices that follow them. Once, and before the first step."""
        for layer in layers:
            assert isinstance(layer.mlp, GatedMLP)
            for norm, linear in ((layer.before_attention, layer.attention.qkv), (layer.before_mlp, layer.mlp.gate_up)):
                assert norm is not None
                assert linear.weight is not None
                linear.weight.mul_(norm.weight)
                norm.weight.fill_(1.0)

    def __call__(
        self,
        x: Tensor,
        squares: Tensor,
        rotations: Mapping[Rope, Rotation],
        attend: FusedAttend,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden], which is used up, and its rows' sums of squares [T, 1] -> [T, hidden], not yet normed, and
        what the layers `taps` read [taps, T, hidden]."""
        stream = _Stream(x, squares)
        tapped = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = x.clone()
            attention, mlp = layer.attention, layer.mlp
            assert isinstance(mlp, GatedMLP)
            rotation = None if layer.rope is None else rotations[layer.rope]
            attended = attention.attended(stream.product(layer.before_attention, attention.qkv), rotation, attend)
            stream.add_product(attention.output, attended, layer.before_mlp)
            inner = stream.product(layer.before_mlp, mlp.gate_up, gated=True)
            stream.add_product(mlp.down, inner, layer.before_attention)
        return x, torch.stack([tapped[index] for index in taps]) if taps else None


class _Stream:
    """The residual stream, with what the next norm needs: the sums of squares of its rows, or the norm itself."""

    def __init__(self, x: Tensor, squares: Tensor) -> None:
        self.x = x
        self.squares: Tensor | None = squares
        self.normed: Tensor | None = None

    def product(self, norm: RMSNorm | None, linear: Linear, *, gated: bool = False) -> Tensor:
        """The normed stream times a weight."""
        from chairlift.kernels.triton.products import is_faster, product

        assert norm is not None
        assert linear.weight is not None
        columns = linear.out_features // (2 if gated else 1)
        if is_faster(len(self.x), columns, linear.in_features, gated):
            x = self.x if self.normed is None else self.normed
            return product(x, linear.weight, squares=self.squares, eps=norm.eps, bias=linear.bias, gated=gated)[0]
        found = linear(norm(self.x) if self.normed is None else self.normed)
        return gate(found, F.silu) if gated else found

    def add_product(self, linear: Linear, y: Tensor, next_norm: RMSNorm | None) -> None:
        """Adds y times a weight."""
        from chairlift.kernels.triton.products import is_faster, product

        assert next_norm is not None
        assert linear.weight is not None
        self.squares = self.normed = None
        if is_faster(len(y), linear.out_features, linear.in_features, gated=False):
            self.squares = product(y, linear.weight, add_to=self.x)[1]
        else:  # norms of all layers are alike by now, but for the last one's, which is not ours
            self.normed = next_norm.add_(self.x, linear(y))
