"""Base classes of the sampling parameters that have an implementation: logit edits and probability filters.

A module of this package implements a field of SamplingParams, which core/sampling/params.py declares. A plugin
registers the same kind of class, with its own `declaration`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sampling.parameter import SamplingParameter
from chairlift.core.sampling.params import SamplingParams

Ids: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.float32]
Edit = TypeVar("Edit", bound="LogitsEdit")


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """The data that an edit is created from."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]  # tokens generated before a preemption
    eos_ids: Sequence[int]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EditedRow(Generic[Edit]):
    """One row of logits that an edit applies to."""

    index: int
    edit: Edit
    drafts: Sequence[int]  # draft tokens between the request's output and this row


class LogitsEdit:
    """A parameter that edits logits. An instance holds the state of one request.

    A subclass overrides `edit`, or `edit_rows` where a whole batch can be edited at once.
    """

    declaration: ClassVar[SamplingParameter | None] = None
    order: ClassVar[int] = 100  # edits with a lower number are applied first

    def __init__(self, request: SampledRequest) -> None:
        self.request = request

    def applies(self, position: int) -> bool:
        """Return whether the token at `position` of the output is edited."""
        return True

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Edit one row [V] in place."""
        raise NotImplementedError

    @classmethod
    def edit_rows(cls: type[Edit], logits: Tensor, rows: Sequence[EditedRow[Edit]]) -> None:
        """Edit some rows of logits [S, V] in place."""
        for row in rows:
            row.edit.edit(logits[row.index], row.drafts)

    def observe(self, token: int) -> None:
        """Update the state after the request generated `token`."""


class ProbabilityFilter:
    """A parameter that excludes all tokens whose probability is below a floor.

    Tokens that tie at the floor are kept or excluded together, so no order among equals is needed.
    """

    declaration: ClassVar[SamplingParameter | None] = None
    order: ClassVar[int] = 100  # filters with a lower number are applied first
    sums: ClassVar[bool] = False  # whether it sums probabilities, which needs excluded ones set to zero first

    @staticmethod
    def floor(weights: Tensor, values: Sequence[Any]) -> Tensor:
        """Return the lowest weight [R, 1] that each row of `weights` [R, V] keeps, given the row's parameter value."""
        raise NotImplementedError


def flat_index(logits: Tensor, rows: Iterable[tuple[int, Ids]]) -> Tensor:
    """Return the positions of the given token ids of each row in the flattened logits."""
    width = logits.shape[1]
    index = np.concatenate([ids + row * width for row, ids in rows])
    return torch.from_numpy(index).to(logits.device)


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
