"""What becomes of the logits of a batch: masks, edits, filters, and one token per row by arg max or random draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.plan import BAD_LOGITS
from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, Stage
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.randomness import FACTORS, GOLDEN
from chairlift.sampling.parameters.base import EditedRow, LogitsEdit, ProbabilityFilter, SampledRequest


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


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`uniform(seed, position)` for each pair; sums and products of uint64 wrap around, as SplitMix64 requires.

    seeds: [R] uint64; positions: [R]; result: [R] float64."""
    spread = (positions + 1).astype(np.uint64) * np.uint64(GOLDEN)
    numbers: np.ndarray = (_mix(_mix(seeds) + spread) >> np.uint64(11)) * 2.0**-53
    return numbers


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(FACTORS[1])
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


Filters: TypeAlias = tuple[tuple[type[ProbabilityFilter], Any], ...]  # filters with the request's parameter values


def filters_of(params: SamplingParams) -> Filters:
    """Return the filters that a request's parameters need."""
    names = params.implementations(Stage.FILTER)
    return tuple((cast(type[ProbabilityFilter], SAMPLING_PARAMETERS.get(name)), params.value(name)) for name in names)


def filter_probabilities(weights: Tensor, filters: Sequence[Filters]) -> None:
    """Zero the probabilities that each row's filters exclude, in place. weights: [R, V], rows sum to 1."""
    kinds: dict[type[ProbabilityFilter], list[tuple[int, Any]]] = {}
    for row, of_row in enumerate(filters):
        for kind, value in of_row:
            kinds.setdefault(kind, []).append((row, value))
    if not kinds:
        return
    floor = torch.zeros(len(weights), 1, device=weights.device)
    has_floor = False
    for kind in sorted(kinds, key=lambda kind: (kind.order, kind.__name__)):
        if kind.sums and has_floor:
            _keep(weights, floor)
        rows, values = zip(*kinds[kind], strict=True)
        if len(rows) == len(weights):
            floor = torch.maximum(floor, kind.floor(weights, values))
        else:
            index = torch.tensor(rows, device=weights.device)
            floor[index] = torch.maximum(floor[index], kind.floor(weights.index_select(0, index), values))
        has_floor = True
    _keep(weights, floor)


def _keep(weights: Tensor, floor: Tensor) -> None:
    """Zero the weights below each row's floor [R, 1]. A mask of floats is several times faster than `where`."""
    kept = torch.empty_like(weights)
    torch.ge(weights, floor, out=kept)
    weights.mul_(kept)


MAX_BLOCK = 512


def greedy(logits: Tensor) -> Tensor:
    """Return the most likely token of each row [S]: the lowest id among ties, BAD_LOGITS where it is not finite."""
    if logits.device.type == "cpu":
        # torch's CPU arg max is not vectorised, and numpy's small operations take a third of the time of torch's.
        values = logits.numpy()
        best = values.argmax(axis=-1)  # the first NaN of a row, if there is one
        best[~np.isfinite(values[np.arange(len(values)), best])] = BAD_LOGITS
        return torch.from_numpy(best)
    tokens = logits.argmax(dim=-1)
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens.where(chosen.isfinite(), BAD_LOGITS)


def draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw one token per row [R]: invert the cumulative weights, in vocabulary order, at the row's uniform number.

    Works in two levels (block of tokens, then token in the block), which avoids a cumulative sum over the whole
    vocabulary. The result is BAD_LOGITS where the weights of a row have no positive sum.
    """
    rows, vocab = weights.shape
    blocks = weights.view(rows, -1, _block_size(vocab))
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * total
    block, before = _first_above(cumulative, target)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]]
    token, _ = _first_above(inside.cumsum(dim=-1, dtype=torch.float64), target - before)
    tokens = block * blocks.shape[2] + token
    return tokens.where(total > 0, BAD_LOGITS).squeeze(1)


def accept_or_draw(
    weights: Tensor,
    uniforms: Sequence[float],
    drafts: Sequence[int],
    draft_probabilities: Tensor,
    acceptance_uniforms: Sequence[float],
) -> Tensor:
    """Return one token per row [R], distributed as `weights`, given drafts drawn from `draft_probabilities` [R, V].

    A draft is accepted with probability min(1, weight / draft probability). Otherwise the token is drawn from the
    positive part of the difference (speculative sampling: Leviathan, Kalman and Matias, 2023). Each row of
    `draft_probabilities` sums to 1. `weights` is changed in place.
    """
    weights /= weights.sum(dim=-1, keepdim=True)
    draft = torch.tensor(drafts, device=weights.device)[:, None]
    uniform = torch.tensor(acceptance_uniforms, dtype=weights.dtype, device=weights.device)[:, None]
    accepted = uniform * draft_probabilities.gather(1, draft) < weights.gather(1, draft)
    rest = (weights - draft_probabilities).clamp_(min=0)
    none_left = rest.sum(dim=-1, keepdim=True) <= 0  # the two distributions differ only by rounding
    return draft.squeeze(1).where(accepted.squeeze(1), draw(rest.where(~none_left, weights), uniforms))


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index at which each row first exceeds its target, and the sum before that index. All are [R, 1].

    The target is kept below the row's total, so that rounding never leads past the end. A token of weight zero is never
    found, since the sum must grow at the index.
    """
    end = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    index = (cumulative <= target).sum(dim=-1, keepdim=True)
    before = cumulative.gather(1, (index - 1).clamp_(min=0)).where(index > 0, 0.0)
    return index, before


@cache
def _block_size(vocab: int) -> int:
    """Return the largest divisor of the vocabulary size up to MAX_BLOCK, so that no row needs padding."""
    return max(size for size in range(1, min(vocab, MAX_BLOCK) + 1) if vocab % size == 0)
