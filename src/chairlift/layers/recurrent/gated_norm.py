"""The norm and the gate between a recurrence and its output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.parts import Targets
from chairlift.layers.rows import one_by_one


@dataclass(frozen=True, slots=True)
class GateOrder:
    """How the gate is applied: before the norm or after it, through which function; `norm` False: no norm at all."""

    norm: bool = True
    first: bool = False
    activation: Literal["silu", "sigmoid"] = "silu"
    scale: float = 1.0  # It multiplies the result.


class GatedNorm:
    """RMS norm of each group of columns, times the activation of a gate; computed in float32."""

    def __init__(
        self, size: int, group: int, eps: float, order: GateOrder, *, repeats: int = 1, device: torch.device
    ) -> None:
        """`size` columns in groups of `group`; each of the `repeats` equal parts of them has the same weights."""
        self.weight = torch.empty(size // repeats, dtype=torch.float32, device=device) if order.norm else None
        self.group, self.eps, self.order = group, eps, order
        self._repeats = repeats
        self._batch_invariant = False

    def targets(self, name: str) -> Targets:
        if self.weight is not None:
            yield f"{name}.weight", self.weight

    @property
    def num_bytes(self) -> int:
        return 0 if self.weight is None else self.weight.nbytes

    def finalize(self) -> None:
        """Nothing to do: the weights stay in float32."""

    def make_batch_invariant(self) -> None:
        self._batch_invariant = True

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, size] -> [T, size] of the gate's type; `gate` may be columns of a wider tensor."""
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.gates import gated_norm

            return gated_norm(x, gate, self.weight, self.group, self.eps, self.order)
        if self._batch_invariant:
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
