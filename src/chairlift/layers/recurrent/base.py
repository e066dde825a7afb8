"""What a decoder needs from its recurrent layers, and what these are made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.linear import Build, Linear
from chairlift.layers.parts import Part, Targets
from chairlift.layers.rows import one_by_one

if TYPE_CHECKING:
    from chairlift.kernels.cpu.recurrence import Sequences
    from chairlift.kernels.triton.recurrent.gates import RawGates

    Gates = tuple[Tensor, Tensor] | RawGates


class RecurrentMixer(Part, ABC):
    """Mixes each row with those before it in its sequence, by states that it reads from slots and writes to slots.

    The caller applies the output projection, because one kernel may do it together with the addition that follows.
    """

    output: Linear

    @abstractmethod
    def targets(self) -> Targets:
        """The tensors that a checkpoint fills."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: RecurrentBatch, states: Mapping[str, Tensor]) -> Tensor:
        """x [T, hidden] -> the input of `output` [T, size]."""


class RecurrentShape(ABC):
    """The sizes of one recurrent layer, from which its states and its parts follow."""

    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """The tensors that one slot holds."""

    @abstractmethod
    def num_parameters(self, hidden_size: int) -> int: ...

    @abstractmethod
    def make(self, hidden_size: int, eps: float, build: Build) -> RecurrentMixer:
        """A layer with empty weights; `eps` is that of the model's norms."""


def on_host(batch: RecurrentBatch) -> Sequences:
    from chairlift.kernels.cpu.recurrence import Sequences

    return Sequences(batch.starts.numpy(), batch.read.numpy(), batch.write.numpy())


def inputs_spec(channels: int, width: int) -> StateSpec:
    """The state of a convolution: the inputs of the last rows, oldest first."""
    return StateSpec("convolution", (width - 1, channels), torch.float32)


class CausalConvolution(Part):
    """Each channel with a filter of its own over the last `width` rows; then silu, if the layer has it."""

    def __init__(self, channels: int, width: int, *, bias: bool, silu: bool, device: torch.device) -> None:
        self.weight = torch.empty(width, channels, dtype=torch.float32, device=device)
        self.bias = torch.empty(channels, dtype=torch.float32, device=device) if bias else None
        self.silu = silu

    def targets(self, names: Sequence[str], sizes: Sequence[int] | None = None) -> Targets:
        """Checkpoints have [channels, 1, width]; one that holds the filters in parts has a name and a size for each."""
        sizes = [self.weight.shape[1]] if sizes is None else list(sizes)
        for name, part in zip(names, self.weight.t().unsqueeze(1).split(sizes), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, part in zip(names, self.bias.split(sizes), strict=True):
                yield f"{name}.bias", part

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor, batch: RecurrentBatch, state: Tensor) -> Tensor:
        """x [T, channels], maybe columns of a wider tensor -> [T, channels]; float32 on a CPU."""
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.convolution import convolve

            return convolve(x, self.weight, self.bias, state, batch, silu=self.silu)
        from chairlift.kernels.cpu.recurrence import run_convolution  # numba is slow to import

        return run_convolution(x, self.weight, self.bias, state, on_host(batch), silu=self.silu)


@dataclass(frozen=True, slots=True)
class GateOrder:
    """How the gate is applied: before the norm or after it, through which function; `norm` False: no norm at all."""

    norm: bool = True
    first: bool = False
    activation: Literal["silu", "sigmoid"] = "silu"
    scale: float = 1.0  # It multiplies the result.


class GatedNorm(Part):
    """RMS norm of each group of columns, times the activation of a gate; computed in float32."""

    def __init__(
        self, size: int, group: int, eps: float, order: GateOrder, *, repeats: int = 1, device: torch.device
    ) -> None:
        """`size` columns in groups of `group`; each of the `repeats` equal parts of them has the same weights."""
        self.weight = torch.empty(size // repeats, dtype=torch.float32, device=device) if order.norm else None
        self.group, self.eps, self.order = group, eps, order
        self._repeats = repeats

    def targets(self, name: str) -> Targets:
        if self.weight is not None:
            yield f"{name}.weight", self.weight

    @property
    def num_bytes(self) -> int:
        return 0 if self.weight is None else self.weight.nbytes

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, size] -> [T, size] of the gate's type; `gate` may be columns of a wider tensor."""
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.gates import gated_norm

            return gated_norm(x, gate, self.weight, self.group, self.eps, self.order)
        if self.batch_invariant:
            both = torch.cat((x.float(), gate.float()), dim=1)
            return one_by_one(lambda rows: self._norm_and_gate(*rows.chunk(2, dim=1)), both).to(gate.dtype)
        return self._norm_and_gate(x.float(), gate.float()).to(gate.dtype)

    def _norm_and_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        factor = F.silu(gate) if self.order.activation == "silu" else torch.sigmoid(gate)
        if self.weight is None:
            return x.mul(factor).mul_(self.order.scale)
        if self.order.first:
            x = x * factor
        normed = F.rms_norm(x.unflatten(1, (-1, self.group)), (self.group,), None, self.eps)
        normed = normed.reshape(len(x), self._repeats, -1).mul_(self.weight * self.order.scale).view(x.shape)
        return normed if self.order.first else normed.mul_(factor)


@dataclass(frozen=True, slots=True)
class RecurrenceRule:
    """How a token changes the matrix S of a head, and what it reads from it.

    S <- decay * S + rate * k (v - kᵀS)ᵀ        with `delta`
    S <- decay * S + rate * k vᵀ                without
    o = scale * qᵀS
    """

    delta: bool
    normalize: bool = False  # scale queries and keys to length one
    scale: float = 1.0
    eps: float = 1e-6  # added to the squared length of queries and keys that are normalised


def matrix_spec(heads: int, key_dim: int, value_dim: int) -> StateSpec:
    """The state of a recurrence: the matrices of all heads, in float32 whatever the model's type."""
    return StateSpec("recurrent", (heads, key_dim, value_dim), torch.float32)


class LinearRecurrence(Part):
    """Runs a rule over the rows of each sequence, from the states that they continue from."""

    def __init__(self, rule: RecurrenceRule) -> None:
        self.rule = rule

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        state: Tensor,
        batch: RecurrentBatch,
        skip: Tensor | None = None,
    ) -> Tensor:
        """q, k [T, key heads, d_k], v [T, heads, d_v] -> [T, heads, d_v].

        gates: decay [T, heads, 1 or d_k] float32, the logarithm, and rate [T, heads] float32, or what the GPU's kernel
        computes them from; skip [heads]: multiples of v to add. Consecutive heads share a key head.
        """
        rule = self.rule
        if on_gpu(v.device):
            from chairlift.kernels.triton.recurrent.recurrence import run_recurrence

            return run_recurrence(q, k, v, gates, rule, state, batch, skip, sequential=self.batch_invariant)
        from chairlift.kernels.cpu.recurrence import Rule, run_on_team  # numba is slow to import

        numbers = Rule(rule.delta, rule.normalize, np.float32(rule.scale), np.float32(rule.eps))
        skip = torch.zeros(v.shape[1]) if skip is None else skip
        decay, rate = gates[:2]
        assert rate is not None
        return run_on_team(q, k, v, decay, rate, skip, numbers, state, on_host(batch))


class StepGate(Part):
    """Turns a projection into time steps and the decay of S: step = softplus(x + bias), decay = -exp(A_log) * step."""

    def __init__(
        self, heads: int, width: int = 1, *, limits: tuple[float, float] | None = None, device: torch.device
    ) -> None:
        """`width`: numbers per head (1, or one for each row of S); `limits`: of the step."""
        self.log_rate = torch.empty(heads, dtype=torch.float32, device=device)  # A_log
        self.bias = torch.empty(heads * width, dtype=torch.float32, device=device)
        self.heads, self.limits = heads, limits

    def targets(self) -> Targets:
        yield "A_log", self.log_rate
        yield "dt_bias", self.bias

    @property
    def num_bytes(self) -> int:
        return self.log_rate.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor, rate: Tensor | None) -> Gates:
        """x [T, heads * width] -> decay [T, heads, width] and rate [T, heads], both float32; on a GPU their inputs.

        The rate is the sigmoid of `rate` [T, heads] or, without it, the step.
        """
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.gates import RawGates

            return RawGates(x, rate, self.log_rate, self.bias, self.limits or (0.0, math.inf))
        step = self._apply(F.softplus, x.float() + self.bias)
        if self.limits is not None:
            step = step.clamp(*self.limits)
        decay = step.unflatten(1, (self.heads, -1)) * -self.log_rate.exp()[:, None]
        return decay, step if rate is None else self._apply(torch.sigmoid, rate.float())

    def _apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return one_by_one(function, x) if self.batch_invariant else function(x)
