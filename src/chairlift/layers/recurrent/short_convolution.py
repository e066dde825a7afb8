"""The gated short convolution of LFM2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.linear import Linear
from chairlift.layers.parts import Part, Targets
from chairlift.layers.recurrent.base import RecurrentMixer, RecurrentShape
from chairlift.layers.recurrent.convolution import CausalConvolution, inputs_spec


@dataclass(frozen=True, slots=True)
class ShortConvolutionShape(RecurrentShape):
    channels: int
    width: int
    bias: bool

    def states(self) -> tuple[StateSpec, ...]:
        return (inputs_spec(self.channels, self.width),)

    def num_parameters(self, hidden_size: int) -> int:
        products = (hidden_size + self.bias) * 3 * self.channels + (self.channels + self.bias) * hidden_size
        return products + self.channels * (self.width + self.bias)

    def make(
        self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device, format: type[WeightFormat]
    ) -> ShortConvolution:
        return ShortConvolution(self, hidden_size, dtype, device, format)


class ShortConvolution(RecurrentMixer):
    """c * convolution(b * x), where one product gives b, c and x."""

    def __init__(
        self,
        shape: ShortConvolutionShape,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat],
    ) -> None:
        channels = shape.channels
        self.inputs = Linear.empty(
            hidden_size, 3 * channels, bias=shape.bias, dtype=dtype, device=device, format=format
        )
        self.convolution = CausalConvolution(channels, shape.width, bias=shape.bias, silu=False, device=device)
        self.output = Linear.empty(channels, hidden_size, bias=shape.bias, dtype=dtype, device=device, format=format)

    def targets(self) -> Targets:
        yield from self.inputs.targets(["in_proj"])
        yield from self.convolution.targets(["conv"])
        yield from self.output.targets(["out_proj"])

    def parts(self) -> Iterator[Part]:
        yield from (self.inputs, self.convolution, self.output)

    def __call__(self, x: Tensor, batch: RecurrentBatch, states: Mapping[str, Tensor]) -> Tensor:
        before, after, values = self.inputs(x).chunk(3, dim=1)
        mixed = self.convolution(before * values, batch, states["convolution"])
        return (after * mixed).to(x.dtype)
