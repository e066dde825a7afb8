"""Gated delta nets: that of Qwen3-Next and Qwen3.5, and Kimi delta attention (KDA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Build, Linear
from chairlift.layers.parts import Part, PermutedHeads, Target, Targets, present
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
class GatedDeltaShape(RecurrentShape):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int  # The convolution sees this many tokens.
    by_key_head: bool  # the checkpoint has the projections of each key head together, instead of one after the other

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_size + self.value_size

    def states(self) -> tuple[StateSpec, ...]:
        return inputs_spec(self.channels, self.width), matrix_spec(self.heads, self.key_dim, self.value_dim)

    def num_parameters(self, hidden_size: int) -> int:
        products = hidden_size * (self.channels + 2 * self.value_size + 2 * self.heads)
        return products + self.channels * self.width + 2 * self.heads + self.value_dim

    def make(self, hidden_size: int, eps: float, build: Build) -> GatedDeltaNet:
        return GatedDeltaNet(self, hidden_size, eps, build)


class GatedDeltaNet(RecurrentMixer):
    """One product gives q, k, v, the output's gate z and the gates of the recurrence.

    The gates stay plain: they are another product where the other weights are rounded.
    """

    def __init__(self, shape: GatedDeltaShape, hidden_size: int, eps: float, build: Build) -> None:
        self.shape = shape
        size, heads = shape.value_size, shape.heads
        self._sizes = [shape.channels, size, heads, heads]  # They are those of q, k and v, of z, rates and steps.
        first = sum(self._sizes) if build.format is PlainWeight else shape.channels + size
        self.inputs = build.linear(hidden_size, first)
        self.gates: Linear | None = None
        if build.format is not PlainWeight:
            self.gates = build.plain.linear(hidden_size, 2 * heads)
        self.convolution = CausalConvolution(shape.channels, shape.width, bias=False, silu=True, device=build.device)
        self.step = StepGate(heads, device=build.device)
        self.norm = GatedNorm(size, shape.value_dim, eps, GateOrder(), repeats=heads, device=build.device)
        self.output = build.linear(size, hidden_size)
        self.recurrence = LinearRecurrence(RecurrenceRule(delta=True, normalize=True, scale=shape.key_dim**-0.5))

    def targets(self) -> Targets:
        shape = self.shape
        if shape.by_key_head:
            groups = shape.heads // shape.key_heads
            qkvz = (shape.key_dim, shape.key_dim, groups * shape.value_dim, groups * shape.value_dim)
            sizes = [shape.channels + shape.value_size, 2 * shape.heads]
            inputs, gates = self._input_targets(["in_proj_qkvz", "in_proj_ba"], sizes)
            yield from _split([inputs], shape.key_heads, qkvz)
            yield from _split([gates], shape.key_heads, (groups, groups))
        else:
            yield from self._input_targets(["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], self._sizes)
        yield from self.convolution.targets(["conv1d"])
        yield from self.step.targets()
        yield from self.norm.targets("norm")
        yield from self.output.targets(["out_proj"])

    def _input_targets(self, names: Sequence[str], sizes: Sequence[int]) -> Targets:
        """The rows of the first product, or of the first two."""
        if self.gates is None:
            yield from self.inputs.targets(names, sizes)
            return
        count = len(names) // 2
        yield from self.inputs.targets(names[:count], sizes[:count])
        yield from self.gates.targets(names[count:], sizes[count:])

    def parts(self) -> tuple[Part, ...]:
        return present(self.inputs, self.gates, self.convolution, self.step, self.recurrence, self.norm, self.output)

    def __call__(self, x: Tensor, batch: RecurrentBatch, states: Mapping[str, Tensor]) -> Tensor:
        shape = self.shape
        projected = self.inputs(x).split(self._sizes[: 4 if self.gates is None else 2], dim=1)
        mixed, gate = projected[:2]
        rate, step = projected[2:] if self.gates is None else self.gates(x).chunk(2, dim=1)
        mixed = self.convolution(mixed, batch, states["convolution"])
        q, k, v = mixed.split((shape.key_size, shape.key_size, shape.value_size), dim=1)
        keys, values = (-1, shape.key_dim), (-1, shape.value_dim)
        out = self.recurrence(
            q.unflatten(1, keys),
            k.unflatten(1, keys),
            v.unflatten(1, values),
            self.step(step, rate),
            states["recurrent"],
            batch,
        )
        return self.norm(out.flatten(1), gate)


def _split(targets: Iterable[tuple[str, Target]], heads: int, sizes: Sequence[int]) -> Targets:
    """Put the parts, of these sizes, one after the other; the checkpoint has all parts of each head together."""
    order = torch.arange(heads * sum(sizes)).view(heads, -1).split(list(sizes), dim=1)
    rows = torch.cat([part.flatten() for part in order])
    return ((name, PermutedHeads(target, rows, 0)) for name, target in targets)


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
    """A gated delta net in which every row of the state has a decay of its own.

    Queries, keys and values are one product; the decay and the output's gate each come through a narrow layer.
    """

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
