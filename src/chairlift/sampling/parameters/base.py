"""The two kinds of sampling parameters that have code of their own: edits of logits and filters of probabilities.

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
    """What an edit can read about its request when the request enters the sampler."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]  # tokens that were generated before; after a preemption there are some
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
        """Whether the token at `position` of the output is affected."""
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
        """The request has generated `token`."""


class ProbabilityFilter:
    """A parameter that excludes all tokens whose probability is below a floor.

    So tokens that tie at the floor stay or go together, and no order among equals is invented.
    """

    declaration: ClassVar[SamplingParameter | None] = None
    order: ClassVar[int] = 100  # filters with a lower number are applied first
    sums: ClassVar[bool] = False  # whether it adds up probabilities, so that what is already excluded must be zero

    @staticmethod
    def floor(weights: Tensor, values: Sequence[Any]) -> Tensor:
        """The lowest weight [R, 1] that each row of `weights` [R, V] keeps, given the row's value of the parameter."""
        raise NotImplementedError


def flat_index(logits: Tensor, rows: Iterable[tuple[int, Ids]]) -> Tensor:
    """Positions in the flattened logits of the token ids of each (row, ids)."""
    width = logits.shape[1]
    index = np.concatenate([ids + row * width for row, ids in rows])
    return torch.from_numpy(index).to(logits.device)


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
