"""Kimi delta attention (KDA): a gated delta net in which every row of the state has a decay of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
class KimiDeltaShape(RecurrentShape):
    heads: int
    head_dim: int
    width: int  # The convolution sees this many tokens.

    @property
    def size(self) -> int:
        return self.heads * self.head_dim

    def states(self) -> tuple[StateSpec, ...]:
        return inputs_spec(3 * self.size, self.width), matrix_spec(self.heads, self.head_dim, self.head_dim)

    def num_parameters(self, hidden_size: int) -> int:
        products = hidden_size * (4 * self.size + self.heads + 2 * self.head_dim) + 2 * self.head_dim * self.size
        return products + 3 * self.size * self.width + self.heads + self.size + self.head_dim

    def make(self, hidden_size: int, eps: float, build: Build) -> KimiDeltaAttention:
        return KimiDeltaAttention(self, hidden_size, eps, build)


class KimiDeltaAttention(RecurrentMixer):
    """Queries, keys and values in one product; the decay and the output's gate each come through a narrow layer."""

    def __init__(self, shape: KimiDeltaShape, hidden_size: int, eps: float, build: Build) -> None:
        self.shape = shape
        size, heads, dim = shape.size, shape.heads, shape.head_dim
        self.inputs = build.linear(hidden_size, 3 * size)
        # The narrow layers and the rate stay plain: they are small, and the decay is sensitive to rounding.
        self._narrow = (heads, dim, dim)
        self.narrow = build.plain.linear(hidden_size, sum(self._narrow))
        self.decay = build.plain.linear(dim, size)
        self.gate = build.plain.linear(dim, size)
        self.convolution = CausalConvolution(3 * size, shape.width, bias=False, silu=True, device=build.device)
        self.step = StepGate(heads, dim, device=build.device)
        self.norm = GatedNorm(size, dim, eps, GateOrder(activation="sigmoid"), repeats=heads, device=build.device)
        self.output = build.linear(size, hidden_size)
        self.recurrence = LinearRecurrence(RecurrenceRule(delta=True, normalize=True, scale=dim**-0.5))

    def targets(self) -> Targets:
        sizes = [self.shape.size] * 3
        yield from self.inputs.targets(["q_proj", "k_proj", "v_proj"], sizes)
        yield from self.narrow.targets(["b_proj", "f_a_proj", "g_a_proj"], self._narrow)
        yield from self.decay.targets(["f_b_proj"])
        yield from self.gate.targets(["g_b_proj"])
        yield from self.convolution.targets(["q_conv1d", "k_conv1d", "v_conv1d"], sizes)
        yield "A_log", self.step.log_rate.view(1, 1, -1, 1)
        yield "dt_bias", self.step.bias
        yield from self.norm.targets("o_norm")
        yield from self.output.targets(["o_proj"])

    def parts(self) -> tuple[Part, ...]:
        weights = (self.inputs, self.narrow, self.decay, self.gate, self.convolution)
        return *weights, self.step, self.norm, self.output

    def __call__(self, x: Tensor, batch: RecurrentBatch, states: Mapping[str, Tensor]) -> Tensor:
        heads = (-1, self.shape.head_dim)
        rate, decay, gate = self.narrow(x).split(self._narrow, dim=1)
        mixed = self.convolution(self.inputs(x), batch, states["convolution"])
        q, k, v = (part.unflatten(1, heads) for part in mixed.chunk(3, dim=1))
        gates = self.step(self.decay(decay.contiguous()), rate)
        out = self.recurrence(q, k, v, gates, states["recurrent"], batch)
        return self.norm(out.flatten(1), self.gate(gate.contiguous()))
