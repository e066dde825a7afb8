"""Feed-forward blocks, with and without a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import Fusion
from chairlift.layers.linear import Build, Linear
from chairlift.layers.parts import Part, Targets
from chairlift.layers.rows import row_by_row

Activation = Callable[[Tensor], Tensor]


_gelu_tanh = partial(F.gelu, approximate="tanh")
# A plugin may add its own. Experts have no xielu, which is a class below.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
# What the Triton kernels call those that they have.
KERNEL_NAMES: dict[object, str] = {F.silu: "silu", _gelu_tanh: "gelu_tanh"}


class XIELU:
    """An activation with learned factors: above * x² + beta * x, and below * (eˣ - 1 - x) + beta * x for x < 0."""

    def __init__(self, build: Build) -> None:
        self._alphas = {name: build.empty(1) for name in ("alpha_p", "alpha_n")}
        self._constants = {name: build.empty() for name in ("beta", "eps")}

    def targets(self, name: str) -> Targets:
        yield from ((f"{name}.{key}", tensor) for key, tensor in (self._alphas | self._constants).items())

    def factors(self) -> tuple[float, float, float, float]:
        """above, below, beta, and the largest x of the exponential."""
        above, below = (float(F.softplus(alpha)) for alpha in self._alphas.values())
        beta, eps = (float(constant) for constant in self._constants.values())
        return above, below + beta, beta, eps

    def __call__(self, x: Tensor) -> Tensor:
        above, below = (F.softplus(alpha) for alpha in self._alphas.values())
        beta, eps = self._constants.values()
        negative = torch.expm1(x.clamp(max=eps)).sub_(x).mul_(below + beta)
        return torch.where(x > 0, above * x.square(), negative).addcmul_(x, beta)


class ScaledActivation:
    """An activation between two factors: after * activation(before * x)."""

    def __init__(self, activation: Activation, before: float, after: float) -> None:
        self._activation, self._before, self._after = activation, before, after

    def __call__(self, x: Tensor) -> Tensor:
        return self._activation(x * self._before).mul_(self._after)


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and `up` within it on both sides."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1).mul_(gate * torch.sigmoid(gate * self.alpha))


def apply_gate(gate_up: Tensor, activation: Activation | ClampedGate) -> Tensor:
    """gate_up [rows, 2 * size], the gate's columns first -> [rows, size]."""
    if on_gpu(gate_up.device) and activation in KERNEL_NAMES:
        from chairlift.kernels.triton.products.activation import gated_mul

        return gated_mul(gate_up, KERNEL_NAMES[activation])
    if on_gpu(gate_up.device) and isinstance(activation, ClampedGate):
        from chairlift.kernels.triton.products.activation import clamped_mul

        return clamped_mul(gate_up, activation.alpha, activation.limit)
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedGate):
        return activation(gate, up)
    return activation(gate).mul_(up)


class DenseMLP(Part):
    """Two products with an activation between them."""

    width: ClassVar[int]  # columns of the first product for each row of the second

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        build: Build,
        *,
        activation: str,
        bias: bool = False,
        multipliers: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """`multipliers`: of the activation's input, and of the block's output."""
        self.first = build.linear(hidden_size, self.width * intermediate_size, bias=bias)
        self.down = build.linear(intermediate_size, hidden_size, bias=bias)
        self._activation: Activation = XIELU(build) if activation == "xielu" else ACTIVATIONS[activation]
        if multipliers != (1.0, 1.0):
            self._activation = ScaledActivation(self._activation, *multipliers)

    def targets(self, inner_names: Sequence[str], down_name: str) -> Targets:
        """`inner_names`: of the first product in the checkpoint; with a gate, one name for both parts or two."""
        sizes = [self.first.out_features // len(inner_names)] * len(inner_names)
        yield from self.first.targets(inner_names, sizes)
        yield from self.down.targets([down_name])
        if self.learned_activation is not None:
            yield from self.learned_activation.targets("act_fn")

    @property
    def learned_activation(self) -> XIELU | None:
        return self._activation if isinstance(self._activation, XIELU) else None

    def parts(self) -> tuple[Linear, Linear]:
        return self.first, self.down

    def activate(self, x: Tensor) -> Tensor:
        """[rows, width * size] -> [rows, size]."""
        raise NotImplementedError

    def inner(self, x: Tensor) -> Tensor:
        """Everything but the down projection."""
        return row_by_row(self.activate, self.first(x))

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions`: those of the rows, which mixtures of experts need."""
        return self.down(self.inner(x))


class GatedMLP(DenseMLP):
    """down(activation(gate(x)) * up(x)), with gate and up in one product."""

    width = 2

    def inner(self, x: Tensor) -> Tensor:
        if self._activation in KERNEL_NAMES and len(x) and self.first.fuses("gate", len(x)):
            gate = Fusion(gated=True, activation=KERNEL_NAMES[self._activation])
            return self.first.weight.product(x, gate).rows
        return super().inner(x)

    def activate(self, x: Tensor) -> Tensor:
        return apply_gate(x, self._activation)


class UngatedMLP(DenseMLP):
    """down(activation(up(x)))."""

    width = 1

    def activate(self, x: Tensor) -> Tensor:
        return self._activation(x)
