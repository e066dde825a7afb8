"""Changes to the logits of some rows: what a grammar allows, bias, banned tokens and penalties.

Bias and penalties of a request touch hundreds of tokens of a vocabulary of many thousands, so their state is a
list of token ids on the host and each edit is one gather and one scatter for the whole batch, on any device. A
grammar has an opinion on every token: its state is a bit for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sampling_params import SamplingParams

Ids: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.float32]
Bits: TypeAlias = NDArray[np.uint32]

# What eight tokens get added to their logits, for each byte of bits: nothing if the bit is set.
_ADDED: Values = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED = _ADDED.astype(np.float32)


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """What the penalties of one row look at. Only to be read: it may be part of what it was taken from."""

    params: SamplingParams
    ids: Ids
    counts: Values


class TokenCounts:
    """The tokens that a request's penalties look at, and how often each was generated.

    Tokens of the prompt are listed (with count 0) only for the repetition penalty: the other two look at the
    output alone.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.params = params
        listed = dict.fromkeys(prompt) if params.repetition_penalty != 1.0 else {}
        self._slot = {token: slot for slot, token in enumerate(listed)}
        self._ids: Ids = np.fromiter(listed, dtype=np.int64, count=len(listed))
        self._counts: Values = np.zeros(len(listed), dtype=np.float32)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> Values:
        return self._counts[: len(self._slot)]

    def after(self, tokens: Sequence[int]) -> SeenTokens:
        """As it will be if these are generated next. Only the counts are copied, however many drafts there are."""
        if not tokens:
            return SeenTokens(self.params, self.ids, self.counts)
        new = [token for token in dict.fromkeys(tokens) if token not in self._slot]
        ids = np.concatenate([self.ids, np.array(new, dtype=np.int64)]) if new else self.ids
        counts = np.concatenate([self.counts, np.zeros(len(new), dtype=np.float32)])
        for token in tokens:
            slot = self._slot.get(token)
            counts[len(self._slot) + new.index(token) if slot is None else slot] += 1
        return SeenTokens(self.params, ids, counts)

    def add(self, token: int) -> None:
        """Count one generated token."""
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows of a step may get."""

    rows: list[int]
    allowed: Bits  # [R, W]: a bit per token, 32 to a word. Those beyond the vocabulary mean nothing.


def allow_only(logits: Tensor, masks: TokenMasks) -> None:
    """Make all that is not allowed impossible, in place. The other rows are not touched."""
    if logits.device.type == "cpu":
        _allow_only_by_row(logits, masks)
    else:
        _allow_only_batched(logits, masks)


def _allow_only_by_row(logits: Tensor, masks: TokenMasks) -> None:
    """For the CPU, where torch's loops for this are not vectorised: numpy's are about five times faster."""
    changes = _ADDED.take(masks.allowed.view(np.uint8), axis=0).reshape(len(masks.rows), -1)
    for row, change in zip(masks.rows, changes, strict=True):
        logits[row].numpy()[:] += change[: logits.shape[1]]


def _allow_only_batched(logits: Tensor, masks: TokenMasks) -> None:
    """For a GPU: the bits travel, and become numbers there."""
    packed = torch.from_numpy(masks.allowed.view(np.uint8)).to(logits.device)
    changes = torch.from_numpy(_ADDED).to(logits.device)[packed.int()].flatten(1)
    logits.index_add_(0, torch.tensor(masks.rows, device=logits.device), changes[:, : logits.shape[1]])


@dataclass(frozen=True, slots=True)
class Bias:
    """What to add to some logits of one request."""

    ids: Ids
    values: Values


def add_bias(logits: Tensor, edits: Sequence[tuple[int, Bias]]) -> None:
    """Add each (row, bias) to its row, in place."""
    index = _flat_index(logits, ((row, bias.ids) for row, bias in edits))
    values = np.concatenate([bias.values for _, bias in edits])
    logits.view(-1).index_add_(0, index, torch.from_numpy(values).to(logits.device))


def ban(logits: Tensor, edits: Sequence[tuple[int, Ids]]) -> None:
    """Make the ids of each (row, ids) impossible in that row, in place."""
    logits.view(-1).index_fill_(0, _flat_index(logits, edits), -torch.inf)


def penalise(logits: Tensor, edits: Sequence[tuple[int, SeenTokens]]) -> None:
    """Apply the three penalties to each (row, counts), in place.

    Repetition pushes a token that was seen towards the unlikely side (a positive logit is divided, a negative
    one multiplied); frequency then subtracts in proportion to the count and presence once.
    """
    index = _flat_index(logits, ((row, seen.ids) for row, seen in edits))
    counts = torch.from_numpy(np.concatenate([seen.counts for _, seen in edits])).to(logits.device)
    chosen = [
        (seen.params.repetition_penalty, seen.params.frequency_penalty, seen.params.presence_penalty)
        for _, seen in edits
    ]
    lengths = [len(seen.ids) for _, seen in edits]
    per_token = np.repeat(np.array(chosen, dtype=np.float32), lengths, axis=0).T.copy()
    repetition, frequency, presence = torch.from_numpy(per_token).to(logits.device)

    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    flat[index] = values


def _flat_index(logits: Tensor, rows: Iterable[tuple[int, Ids]]) -> Tensor:
    """Positions in the flattened logits of the ids of each row."""
    width = logits.shape[1]
    index = np.concatenate([ids + row * width for row, ids in rows])
    return torch.from_numpy(index).to(logits.device)
