"""The state space layer of Mamba 2, Bamba, Granite 4, Nemotron-H and Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.layers.linear import Build
from chairlift.layers.parts import Part, Targets
from chairlift.layers.recurrent.base import (
    CausalConvolution,
    GatedNorm,
    GateOrder,
    LinearRecurrence,
    RecurrenceRule,
    RecurrentMixer,
    RecurrentShape,
    StepGate,
    inputs_spec,
    matrix_spec,
)


@dataclass(frozen=True, slots=True)
class Mamba2Shape(RecurrentShape):
    groups: int  # The heads of a group share B and C, and are normed together.
    heads: int
    state_size: int
    head_dim: int
    width: int  # The convolution sees this many tokens.
    convolution_bias: bool
    input_bias: bool
    output_bias: bool
    step_limits: tuple[float, float]
    order: GateOrder
    scales: tuple[float, float, float, float, float] | None = None  # They multiply z, x, B, C and the step.

    @property
    def size(self) -> int:
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Of B and of C."""
        return self.groups * self.state_size

    @property
    def channels(self) -> int:
        return self.size + 2 * self.group_size

    def states(self) -> tuple[StateSpec, ...]:
        return inputs_spec(self.channels, self.width), matrix_spec(self.heads, self.state_size, self.head_dim)

    def num_parameters(self, hidden_size: int) -> int:
        inputs = self.size + self.channels + self.heads
        products = hidden_size * (inputs + self.size) + inputs * self.input_bias + hidden_size * self.output_bias
        convolution = self.channels * (self.width + self.convolution_bias)
        return products + convolution + 3 * self.heads + self.size * self.order.norm

    def make(self, hidden_size: int, eps: float, build: Build) -> Mamba2Mixer:
        return Mamba2Mixer(self, hidden_size, eps, build)


class Mamba2Mixer(RecurrentMixer):
    """One product gives the gate z, the inputs x, B and C of the recurrence, and its time steps."""

    def __init__(self, shape: Mamba2Shape, hidden_size: int, eps: float, build: Build) -> None:
        self.shape = shape
        size, heads = shape.size, shape.heads
        self._sizes = (size, shape.channels, heads)
        self.inputs = build.linear(hidden_size, sum(self._sizes), bias=shape.input_bias)
        self.convolution = CausalConvolution(
            shape.channels, shape.width, bias=shape.convolution_bias, silu=True, device=build.device
        )
        self.step = StepGate(heads, limits=shape.step_limits, device=build.device)
        self.skip = build.empty(heads, dtype=torch.float32)
        self.norm = GatedNorm(size, size // shape.groups, eps, shape.order, device=build.device)
        self.output = build.linear(size, hidden_size, bias=shape.output_bias)
        self.recurrence = LinearRecurrence(RecurrenceRule(delta=False))
        self._scales: Tensor | None = None
        if shape.scales is not None:
            counts = (size, size, shape.group_size, shape.group_size, heads)
            each = [torch.full((count,), scale) for count, scale in zip(counts, shape.scales, strict=True)]
            self._scales = torch.cat(each).to(build.device)

    def targets(self) -> Targets:
        yield from self.inputs.targets(["in_proj"])
        yield from self.convolution.targets(["conv1d"])
        yield from self.step.targets()
        yield "D", self.skip
        yield from self.norm.targets("norm")
        yield from self.output.targets(["out_proj"])

    def parts(self) -> tuple[Part, ...]:
        return (self.inputs, self.convolution, self.step, self.recurrence, self.norm, self.output)

    def __call__(self, x: Tensor, batch: RecurrentBatch, states: Mapping[str, Tensor]) -> Tensor:
        shape = self.shape
        projected = self.inputs(x)
        if self._scales is not None:
            projected = (projected * self._scales).to(x.dtype)
        gate, mixed, step = projected.split(self._sizes, dim=1)
        mixed = self.convolution(mixed, batch, states["convolution"])
        values, keys, queries = mixed.split((shape.size, shape.group_size, shape.group_size), dim=1)
        out = self.recurrence(
            queries.unflatten(1, (-1, shape.state_size)),
            keys.unflatten(1, (-1, shape.state_size)),
            values.unflatten(1, (-1, shape.head_dim)),
            self.step(step, None),
            states["recurrent"],
            batch,
            self.skip,
        )
        return self.norm(out.flatten(1), gate)
