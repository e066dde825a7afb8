"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.layers.linear import Linear
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
    if gate_up.is_cuda and activation is F.silu:
        from chairlift.kernels.triton.layers import silu_mul

        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


class GatedMLP:
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.gate_up = Linear.empty(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear.empty(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._activation = ACTIVATIONS[activation]
        self._batch_invariant = False

    def make_batch_invariant(self) -> None:
        self.gate_up.batch_invariant = self.down.batch_invariant = self._batch_invariant = True

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    def finalize(self) -> None:
        self.gate_up.finalize()
        self.down.finalize()

    def inner(self, x: Tensor) -> Tensor:
        """All but the last product."""
        gate_up = self.gate_up(x)
        if self._batch_invariant and not x.is_cuda:
            return one_by_one(lambda row: gated(row, self._activation), gate_up)
        return gated(gate_up, self._activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))
