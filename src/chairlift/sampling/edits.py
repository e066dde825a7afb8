"""What changes logits before a token is chosen: edits for a batch, and masks of the tokens that grammars allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, Stage
from chairlift.sampling.parameters.base import EditedRow, LogitsEdit, SampledRequest


def edits_of(request: SampledRequest) -> tuple[LogitsEdit, ...]:
    """Create the logit edits that the request's parameters need; most requests need none."""
    names = request.params.implementations(Stage.LOGITS)
    return tuple(cast(type[LogitsEdit], SAMPLING_PARAMETERS.get(name))(request) for name in names)


def edit_logits(logits: Tensor, rows: Iterable[EditedRow[Any]]) -> None:
    """Apply every row's edit to logits [S, V] in place, all edits of one kind together."""
    kinds: dict[type[LogitsEdit], list[EditedRow[Any]]] = {}
    for row in rows:
        kinds.setdefault(type(row.edit), []).append(row)
    for kind in sorted(kinds, key=lambda kind: (kind.order, kind.__name__)):
        kind.edit_rows(logits, kinds[kind])


Bits: TypeAlias = NDArray[np.uint32]

# For each value of a mask byte, the numbers added to the logits of its eight tokens: 0 where the bit is set, else -inf.
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED = _ADDED.astype(np.float32)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that are allowed in some rows of a step."""

    rows: list[int]
    allowed: Bits  # [R, W]: a bit per token, 32 per word; bits beyond the vocabulary are ignored


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place. Rows without a mask are unchanged."""
    if logits.device.type == "cpu":
        _apply_by_row(logits, masks)
    else:
        _apply_batched(logits, masks)


def _apply_by_row(logits: Tensor, masks: TokenMasks) -> None:
    """For the CPU, where torch's loops for this are not vectorised: numpy's are about five times faster."""
    changes = _ADDED.take(masks.allowed.view(np.uint8), axis=0).reshape(len(masks.rows), -1)
    for row, change in zip(masks.rows, changes, strict=True):
        logits[row].numpy()[:] += change[: logits.shape[1]]


def _apply_batched(logits: Tensor, masks: TokenMasks) -> None:
    """For a GPU: send the bits and expand them there."""
    packed = torch.from_numpy(masks.allowed.view(np.uint8)).to(logits.device)
    changes = torch.from_numpy(_ADDED).to(logits.device)[packed.int()].flatten(1)
    logits.index_add_(0, torch.tensor(masks.rows, device=logits.device), changes[:, : logits.shape[1]])
