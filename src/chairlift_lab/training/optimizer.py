"""The optimizer and the learning rate schedule of a draft head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0


class HeadOptimizer:
    """Muon for the matrices, which needs fewer steps than Adam; Adam for the rest."""

    def __init__(self, head: nn.Module, learning_rate: float) -> None:
        self._head = head
        self._learning_rate = learning_rate
        parameters = list(head.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            # Scale steps like Adam's, so that one learning rate fits both.
            torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, loss: Tensor, done: float) -> None:
        """`done`: the share of the training that is done, from 0 to 1."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * schedule(done)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, for a checkpoint."""
        kept = ((name, state[parameter]) for name, parameter, state in self._states() if parameter in state)
        return {f"{name}/{kind}": torch.as_tensor(value) for name, some in kept for kind, value in some.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter, state in self._states():
            found = {path.partition("/")[2]: value for path, value in tensors.items() if path.startswith(f"{name}/")}
            # Adam keeps its step count on the CPU.
            state[parameter] = {kind: value if kind == "step" else value.to(parameter) for kind, value in found.items()}

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[nn.Parameter, dict[str, Tensor]]]]:
        for name, parameter in self._head.named_parameters():
            yield name, parameter, self._optimizers[0 if parameter.ndim == 2 else 1].state  # type: ignore[misc]


def schedule(done: float) -> float:
    """The factor of the learning rate: a short warm-up, then a cosine down to 0.01."""
    return min(1.0, done / 0.05 + 0.01) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
