"""The linear recurrence of recurrent layers, on a CPU or a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.parts import Targets
from chairlift.layers.recurrent.host import on_host
from chairlift.layers.rows import one_by_one

if TYPE_CHECKING:  # triton is not needed on a CPU
    from chairlift.kernels.triton.recurrent.gates import RawGates

    Gates = tuple[Tensor, Tensor] | RawGates


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


class LinearRecurrence:
    """Runs a rule over the rows of each sequence, from the states that they continue from."""

    num_bytes = 0

    def __init__(self, rule: RecurrenceRule) -> None:
        self.rule = rule
        self._sequential = False

    def finalize(self) -> None:
        """Nothing to do: it has no weights."""

    def make_batch_invariant(self) -> None:
        self._sequential = True

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

            return run_recurrence(q, k, v, gates, rule, state, batch, skip, sequential=self._sequential)
        from chairlift.kernels.cpu.recurrence import Rule, run_on_team  # numba is slow to import

        numbers = Rule(rule.delta, rule.normalize, np.float32(rule.scale), np.float32(rule.eps))
        skip = torch.zeros(v.shape[1]) if skip is None else skip
        decay, rate = gates[:2]
        assert rate is not None
        return run_on_team(q, k, v, decay, rate, skip, numbers, state, on_host(batch))


class StepGate:
    """Turns a projection into time steps and the decay of S: step = softplus(x + bias), decay = -exp(A_log) * step."""

    def __init__(
        self, heads: int, width: int = 1, *, limits: tuple[float, float] | None = None, device: torch.device
    ) -> None:
        """`width`: numbers per head (1, or one for each row of S); `limits`: of the step."""
        self.log_rate = torch.empty(heads, dtype=torch.float32, device=device)  # A_log
        self.bias = torch.empty(heads * width, dtype=torch.float32, device=device)
        self.heads, self.limits = heads, limits
        self._batch_invariant = False

    def targets(self) -> Targets:
        yield "A_log", self.log_rate
        yield "dt_bias", self.bias

    @property
    def num_bytes(self) -> int:
        return self.log_rate.nbytes + self.bias.nbytes

    def finalize(self) -> None:
        """Nothing to do: the weights stay in float32."""

    def make_batch_invariant(self) -> None:
        self._batch_invariant = True

    def __call__(self, x: Tensor, rate: Tensor | None) -> Gates:
        """x [T, heads * width] -> decay [T, heads, width] and rate [T, heads], both float32; on a GPU their inputs.

        The rate is the sigmoid of `rate` [T, heads] or, without it, the step.
        """
        if on_gpu(x.device):
            from chairlift.kernels.triton.recurrent.gates import RawGates

            return RawGates(x, rate, self.log_rate, self.bias, self.limits or (0.0, math.inf))
        return self._step(x, rate)

    def _step(self, x: Tensor, rate: Tensor | None) -> tuple[Tensor, Tensor]:
        step = self._apply(F.softplus, x.float() + self.bias)
        if self.limits is not None:
            step = step.clamp(*self.limits)
        decay = step.unflatten(1, (self.heads, -1)) * -self.log_rate.exp()[:, None]
        return decay, step if rate is None else self._apply(torch.sigmoid, rate.float())

    def _apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return one_by_one(function, x) if self._batch_invariant else function(x)
