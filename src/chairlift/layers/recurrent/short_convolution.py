"""The gated short convolution of LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.layers.linear import Build
from chairlift.layers.parts import Part, Targets
from chairlift.layers.recurrent.base import CausalConvolution, RecurrentMixer, RecurrentShape, inputs_spec


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

    def make(self, hidden_size: int, eps: float, build: Build) -> ShortConvolution:
        return ShortConvolution(self, hidden_size, build)


class ShortConvolution(RecurrentMixer):
    """c * convolution(b * x), where one product gives b, c and x."""

    def __init__(self, shape: ShortConvolutionShape, hidden_size: int, build: Build) -> None:
        channels = shape.channels
        self.inputs = build.linear(hidden_size, 3 * channels, bias=shape.bias)
        self.convolution = CausalConvolution(channels, shape.width, bias=shape.bias, silu=False, device=build.device)
        self.output = build.linear(channels, hidden_size, bias=shape.bias)

    def targets(self) -> Targets:
        yield from self.inputs.targets(["in_proj"])
        yield from self.convolution.targets(["conv"])
        yield from self.output.targets(["out_proj"])

    def parts(self) -> tuple[Part, ...]:
        return (self.inputs, self.convolution, self.output)

    def __call__(self, x: Tensor, batch: RecurrentBatch, states: Mapping[str, Tensor]) -> Tensor:
        before, after, values = self.inputs(x).chunk(3, dim=1)
        mixed = self.convolution(before * values, batch, states["convolution"])
        return (after * mixed).to(x.dtype)
