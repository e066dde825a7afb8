"""What a decoder needs from its recurrent layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from chairlift.attention.recurrent import RecurrentBatch, StateSpec
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.linear import Linear
from chairlift.layers.parts import Part, Targets


class RecurrentMixer(ABC):
    """Mixes each row with those before it in its sequence, by states that it reads from slots and writes to slots.

    The caller applies the output projection, because one kernel may do it together with the addition that follows.
    """

    output: Linear

    @abstractmethod
    def targets(self) -> Targets:
        """The tensors that a checkpoint fills."""

    @abstractmethod
    def parts(self) -> Iterator[Part]: ...

    def linears(self) -> Iterator[Linear]:
        return (part for part in self.parts() if isinstance(part, Linear))

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
    def make(
        self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device, format: type[WeightFormat]
    ) -> RecurrentMixer:
        """A layer with empty weights; `eps` is that of the model's norms."""
