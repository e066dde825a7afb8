"""One step's plan as tensors: many sequences, one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.interface import RaggedLayout
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import StepPlan

PADDING_TOKEN = 0  # any token will do: its results are not read


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T tokens of all chunks, one after the other.

    chunks      a: prefill 4 | b: decode | c: decode | d: prefill 3
    tokens      a0 a1 a2 a3  | b17       | c5        | d8 d9 d10
    positions    0  1  2  3  |  17       |  5        |  8  9  10

    There is no padding, with two exceptions. A static batch keeps the slots of finished requests: each is a sequence of
    one padding token. And padded attention needs a rectangle, in which every sequence is padded to the longest chunk:

    tokens      a0 a1 a2 a3  | b17 _ _ _ | c5 _ _ _  | d8 d9 d10 _
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: each token's place in its own sequence
    sampled_rows: Tensor  # [scored tokens + idle rows] int64: rows of the batch whose logits are computed
    read_rows: Tensor  # [read positions] int64: rows of prompts whose hidden states are needed, none of them sampled
    layout: RaggedLayout
    num_padding: int  # how many of the T tokens are padding

    @property
    def needed_rows(self) -> Tensor | None:
        """Rows whose hidden states are needed: sampled ones, then read ones. None: all rows, in order."""
        if len(self.sampled_rows) == len(self.tokens):
            return None
        return torch.cat([self.sampled_rows, self.read_rows])


def build_batch(plan: StepPlan, storage: KVStorage, device: torch.device, *, rectangular: bool = False) -> InputBatch:
    if not plan.idle_rows and all(chunk.count == 1 and chunk.samples for chunk in plan.chunks):
        return _single_tokens(plan, storage, device)
    chunks, idle, block_size, scratch = plan.chunks, plan.idle_rows, storage.block_size, storage.scratch_block
    starts = np.array([chunk.start for chunk in chunks] + [0] * idle)
    counts = np.array([chunk.count for chunk in chunks] + [1] * idle)
    num_rows = np.full_like(counts, counts.max()) if rectangular else counts
    offsets = [0, *accumulate(num_rows.tolist())]
    sequences = np.repeat(np.arange(len(counts)), num_rows)  # which sequence each row belongs to
    places = np.arange(offsets[-1]) - np.array(offsets)[sequences]
    filled = places < counts[sequences]
    positions = np.where(filled, starts[sequences] + places, 0)
    tables = np.zeros((len(counts), max(len(chunk.table) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=False):
        row[: len(chunk.table)] = chunk.table
    tables[len(chunks) :, 0] = scratch
    blocks = np.where(filled, tables[sequences, positions // block_size], scratch).astype(np.int64)
    tokens = np.full(offsets[-1], PADDING_TOKEN, dtype=np.int64)
    tokens[filled & (sequences < len(chunks))] = [token for chunk in chunks for token in chunk.tokens]
    sampled = [
        offsets[i] + chunk.count - behind for i, chunk in enumerate(chunks) for behind in range(chunk.num_scored, 0, -1)
    ]
    read = [offsets[i] + position - chunk.start for i, chunk in enumerate(chunks) for position in chunk.read]
    return InputBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        sampled_rows=torch.tensor(sampled + offsets[len(chunks) : -1], dtype=torch.int64, device=device),
        read_rows=torch.tensor(read, dtype=torch.int64, device=device),
        layout=RaggedLayout(
            offsets=offsets,
            starts=starts.tolist(),
            ends=(starts + counts).tolist(),
            tables=torch.from_numpy(tables).to(device),
            slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size).to(device),
        ),
        num_padding=len(tokens) - plan.num_tokens,
    )


def _single_tokens(plan: StepPlan, storage: KVStorage, device: torch.device) -> InputBatch:
    """The batch of a plan whose chunks are single tokens that are sampled: most steps, built in a few operations."""
    chunks, size = plan.chunks, storage.block_size
    starts = [chunk.start for chunk in chunks]
    tables = np.zeros((len(chunks), max([len(chunk.table) for chunk in chunks])), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.table)] = chunk.table
    numbers = np.array(
        [
            [chunk.request.tokens[chunk.start] for chunk in chunks],
            starts,
            [chunk.table[chunk.start // size] * size + chunk.start % size for chunk in chunks],
            range(len(chunks)),
        ]
    )
    tokens, positions, slots, rows = torch.from_numpy(numbers).to(device)
    return InputBatch(
        tokens=tokens,
        positions=positions,
        sampled_rows=rows,
        read_rows=rows[:0],
        layout=RaggedLayout(
            offsets=range(len(chunks) + 1),
            starts=starts,
            ends=[start + 1 for start in starts],
            tables=torch.from_numpy(tables).to(device),
            slot_mapping=slots,
        ),
        num_padding=0,
    )
