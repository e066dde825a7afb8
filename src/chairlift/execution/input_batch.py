"""One step's plan as tensors: many sequences, one ragged batch, no padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from chairlift.attention import RaggedLayout
from chairlift.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T tokens of all chunks, one after the other.

    chunks      a: prefill 4 | b: decode | c: decode | d: prefill 3
    tokens      a0 a1 a2 a3  | b17       | c5        | d8 d9 d10
    positions    0  1  2  3  |  17       |  5        |  8  9  10
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: each token's place in its own sequence
    sampled_rows: Tensor  # [number of chunks that sample] int64: rows of the batch whose logits are needed
    layout: RaggedLayout


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> InputBatch:
    chunks = plan.chunks
    tokens: list[int] = []
    for chunk in chunks:
        tokens.extend(chunk.request.tokens[chunk.start : chunk.end])
    counts = [chunk.count for chunk in chunks]
    offsets = [0, *accumulate(counts)]
    starts = np.array([chunk.start for chunk in chunks])
    sequences = np.repeat(np.arange(len(chunks)), counts)  # which chunk each row belongs to
    positions = np.arange(len(tokens)) - np.array(offsets)[sequences] + starts[sequences]
    tables = np.zeros((len(chunks), max(len(chunk.table) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.table)] = chunk.table
    slots = tables[sequences, positions // block_size].astype(np.int64) * block_size + positions % block_size
    sampled = [end - 1 for end, chunk in zip(offsets[1:], chunks, strict=True) if chunk.samples]
    return InputBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
        layout=RaggedLayout(
            offsets=offsets,
            starts=starts.tolist(),
            ends=[chunk.end for chunk in chunks],
            tables=torch.from_numpy(tables).to(device),
            slots=torch.from_numpy(slots).to(device),
        ),
    )
