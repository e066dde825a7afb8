"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Linear
from chairlift.layers.parts import Targets
from chairlift.layers.rows import one_by_one

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [rows, 2 * size], the gate's columns first -> [rows, size]."""
    if on_gpu(gate_up.device) and activation is F.silu:
        from chairlift.kernels.triton.layers import silu_mul

        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        format: type[WeightFormat] = PlainWeight,
    ) -> None:
        kind: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device, "format": format}
        self.gate_up = Linear.empty(hidden_size, 2 * intermediate_size, **kind)
        self.down = Linear.empty(intermediate_size, hidden_size, **kind)
        self._activation = ACTIVATIONS[activation]
        self._batch_invariant = False

    def targets(self, fused_names: bool) -> Targets:
        """`fused_names`: the checkpoint holds gate and up as one tensor."""
        if fused_names:
            yield from self.gate_up.targets(["gate_up_proj"])
        else:
            half = self.gate_up.out_features // 2
            yield from self.gate_up.targets(["gate_proj", "up_proj"], [half, half])
        yield from self.down.targets(["down_proj"])

    def linears(self) -> tuple[Linear, Linear]:
        return self.gate_up, self.down

    def make_batch_invariant(self) -> None:
        self.gate_up.make_batch_invariant()
        self.down.make_batch_invariant()
        self._batch_invariant = True

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    def finalize(self) -> None:
        self.gate_up.finalize()
        self.down.finalize()

    def inner(self, x: Tensor) -> Tensor:
        """Everything but the down projection."""
        gate_up = self.gate_up(x)
        if self._batch_invariant and not on_gpu(x.device):
            return one_by_one(lambda row: gated(row, self._activation), gate_up)
        return gated(gate_up, self._activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))
