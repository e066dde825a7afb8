"""Reference implementation of the sampler for one row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.randomness import uniform

Row = NDArray[np.float64]


def edited(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: Sequence[int],
) -> Row:
    """The row after bias, bans and penalties."""
    row: Row = logits.double().numpy().copy()
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in (*params.stop_ids, *(() if params.ignore_eos else eos_ids)):
            row[token] = -np.inf
    for token in {*prompt, *output}:
        row[token] *= params.repetition_penalty ** (-1 if row[token] > 0 else 1)
    for token in set(output):
        row[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return row


def probabilities(row: Row, params: SamplingParams) -> tuple[Row, bool]:
    """The probabilities after all filters, and whether rounding may change what top-p or min-p keep."""
    scaled = row / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    close = False
    if 0 < params.top_k < len(row):
        weights[weights < np.sort(weights)[-params.top_k]] = 0
        weights /= weights.sum()
    if params.top_p < 1:
        ordered = np.sort(weights)[::-1]
        mass = ordered.cumsum()
        close = bool((np.abs(mass - params.top_p) < 1e-5).any())
        weights[weights < ordered[min(int((mass < params.top_p).sum()), len(row) - 1)]] = 0
        weights /= weights.sum()
    close |= bool((np.abs(weights / weights.max() - params.min_p) < 1e-5).any()) and params.min_p > 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum(), close


def token(row: Row, params: SamplingParams, seed: int, position: int) -> int | None:
    """The expected token, or None where rounding may decide between two."""
    if params.greedy:
        second, first = np.sort(row)[-2:]
        return None if 0 < first - second < 1e-4 else int(row.argmax())
    weights, close = probabilities(row, params)
    sums = weights.cumsum()
    target = uniform(seed, position)
    if close or (np.abs(sums - target) < 1e-5).any():
        return None
    return int((sums <= target).sum())


def small_logits(rows: int, vocab: int, seed: int) -> Tensor:
    """Logits in steps of a quarter, so that ties are frequent and exact."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 8).round() / 4
