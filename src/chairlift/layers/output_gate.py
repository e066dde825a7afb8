"""A gate that multiplies each number of an attention's output."""

from __future__ import annotations

import torch
from torch import Tensor

from chairlift.kernels.gpu import on_gpu
from chairlift.layers.parts import PermutedHeads, Targets
from chairlift.layers.recurrent.gated_norm import GateOrder
from chairlift.layers.rows import one_by_one

SIGMOID = GateOrder(norm=False, activation="sigmoid")


class OutputGate:
    """Multiplies by the sigmoid of a projection, whose rows a checkpoint has beside those of the queries."""

    num_bytes = 0  # the projection is that of the queries

    def __init__(self, num_heads: int, head_dim: int) -> None:
        heads = torch.arange(2 * num_heads * head_dim).view(num_heads, 2, head_dim)
        self._head_dim = head_dim
        self._order = torch.cat((heads[:, 1].flatten(), heads[:, 0].flatten()))
        self._batch_invariant = False

    def split_targets(self, targets: Targets) -> Targets:
        """Put the gates in front of the queries; the checkpoint has the query and the gate of each head together."""
        for name, target in targets:
            yield name, PermutedHeads(target, self._order, 0) if target.shape[0] == len(self._order) else target

    def finalize(self) -> None:
        """Nothing to do: it has no weights."""

    def make_batch_invariant(self) -> None:
        self._batch_invariant = True

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        if self._batch_invariant and not on_gpu(x.device):
            return one_by_one(torch.sigmoid, gate).mul_(x)
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.gates import gated_norm

            return gated_norm(x, gate, None, self._head_dim, 0.0, SIGMOID)
        return torch.sigmoid(gate).mul_(x)
