"""The interface between a recurrent layer and the states of one step.

The state of a sequence is in a *slot*: entry `slot` of every state tensor of every recurrent layer. A step continues
each sequence from one slot and writes the states that are needed later to slots:

    rows        a5 a6 a7 a8 | b17 | c9 c10' c11'      c has two draft tokens
    starts       0            4     5              8
    read         3            -1    7                 a continues from slot 3; b starts with zeros; c from slot 7
    write       -1  2 -1  3 |  0  |  7   8    9       a: a snapshot after a6, its new state after a8

So final states, snapshots within a chunk, one state for each draft token (of which that of the last accepted one is
kept) and copy-on-write (read one slot, write another) are the same operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_SLOT = -1  # read: the state is zero; write: the state is not kept


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of the state of a sequence, such as convolution [width - 1, channels] or recurrent [heads, k, v]."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """The state of one recurrent layer."""

    index: int  # The layer of the state storage that it reads and writes.
    states: tuple[StateSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Of one sequence."""
        return sum(spec.num_bytes for spec in self.states)


@dataclass(frozen=True, slots=True)
class StateStorage:
    """The states of all layers: for each layer its tensors by name, each [num_slots, *shape of the spec]."""

    layers: Sequence[Mapping[str, Tensor]]

    def of(self, layer: RecurrentLayer) -> Mapping[str, Tensor]:
        return self.layers[layer.index]


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """Where the sequences of a ragged batch begin, and their slots. All tensors are int32 on the model's device.

    Sequence i owns rows [starts[i], starts[i + 1]), of which there may be none. Rows from starts[-1] on are padding: no
    state is read or written for them, and their output is not used. No slot is written twice, or read by a sequence
    and written by another one; a sequence may read and write the same slot.
    """

    starts: Tensor  # [sequences + 1]
    read: Tensor  # [sequences]: the slot that the sequence continues from
    write: Tensor  # [rows]: the slot that receives the state after this row
    longest: int  # no sequence has more rows; 1 if all are single tokens


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """The recurrent part of one step, passed to the model as an argument like the attention."""

    batch: RecurrentBatch
    storage: StateStorage
