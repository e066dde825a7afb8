"""One step as tensors: many sequences, one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.recurrent import NO_SLOT, RecurrentBatch, RecurrentStep, StateStorage
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request

PADDING_TOKEN = 0  # any token will do: its results are not read


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """Which rows of the batch belong to which sequence, and where each sequence's cache is. S sequences, T tokens.

    Sequence i owns rows [offsets[i], offsets[i + 1]), which are its tokens at positions [starts[i], ends[i]). In a
    rectangle all sequences own equally many rows; those behind a sequence's tokens are padding.

    Other engines call `offsets` query_start_loc and `ends` seq_lens.
    """

    offsets: Sequence[int]  # S + 1, from 0 to T
    starts: Sequence[int]  # S: the tokens of each sequence whose keys and values are already in the cache
    ends: Sequence[int]  # S: each sequence's length after the step
    tables: Tensor  # [S, longest table] int32: logical -> physical block, zero-padded
    slot_mapping: Tensor  # [T] int64: where each token's key and value go: block * block_size + offset
    beside: Sequence[BlockTables] = ()  # those of layers with other block tables

    def of_table(self, number: int) -> BlockTables:
        """The block tables of that number, and where they say that keys and values go."""
        return self.beside[number - 1] if number else BlockTables(self.tables, self.slot_mapping)


class BlockTables(NamedTuple):
    """What depends on the block tables, of which a model with groups of layers has several."""

    tables: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The same in device memory, as kernels read it: T tokens of C chunks, all int32.

    A slot is a request's place in the runner's batch, and its row of `tables`. Chunks of a single token come first, so
    that chunk i of them is row i of the batch.
    """

    slots: Tensor  # [T]: the slot of each token's request
    positions: Tensor  # [T]: each token's place in its sequence; -1 in padding rows
    tables: Tensor  # [slots, blocks]
    chunk_slot: Tensor  # [C]
    chunk_row: Tensor  # [C]: the batch row of the chunk's first token
    chunk_start: Tensor  # [C]: that token's position
    chunk_count: Tensor  # [C]: 0 for padding
    num_single: int  # only the first `num_single` chunks may be single tokens
    tile_chunk: Tensor  # [tiles]: the chunk that each tile of queries belongs to, -1 for none
    tile_offset: Tensor  # [tiles]: its first query, counted from the chunk's first
    tile_queries: int  # tokens in a tile
    one_per_request: bool = False  # no request has two rows: no row reads what another writes in the same step
    long_contexts: bool = False  # some single token has a long context
    deep_chunks: bool = False  # some longer chunk has a long context
    beside: Sequence[Tensor] = ()  # the tables of layers with other block tables

    def with_table(self, number: int) -> PagedLayout:
        """The layout for layers with the block tables of that number."""
        return replace(self, tables=self.beside[number - 1], beside=()) if number else self


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Rows of a batch that are given as vectors: these replace the lookup of their tokens."""

    rows: Tensor  # [n] int64
    vectors: Tensor  # [n, hidden]: inputs of the first layer
    deep: Sequence[Tensor] = ()  # [n, hidden] each: added to the residual stream behind the first layers

    def put_into(self, x: Tensor) -> Tensor:
        """Overwrite these rows of the embedded tokens x [T, hidden]."""
        return x.index_copy_(0, self.rows, self.vectors.to(x.dtype))

    def add_behind(self, layer: int, x: Tensor) -> None:
        """Add what belongs behind a layer to the residual stream x [T, hidden]."""
        if layer < len(self.deep):
            x.index_add_(0, self.rows, self.deep[layer].to(x.dtype))


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Where the tokens of a prompt with images stand for a rotation in three directions.

    The tokens of an image have a time, a row and a column; text has the same position in all three. Behind the prompt,
    positions go on with a distance of `behind` to a token's place.
    """

    places: np.ndarray  # [3, prompt] int64
    behind: int
    axes: np.ndarray  # [pairs]: the direction in which a pair of a head's dimensions is rotated

    def rows(self, start: int, end: int) -> np.ndarray:
        """[end - start, pairs]: the position of each token for each pair."""
        prompt = self.places[:, start:end]
        rest = np.arange(max(start, self.places.shape[1]), end) + self.behind
        places: np.ndarray = np.concatenate([prompt.T, np.repeat(rest[:, None], 3, axis=1)])
        return places[:, self.axes]


@dataclass(frozen=True, slots=True)
class MutualSpan:
    """Rows of a batch, tokens [start, end) of one sequence, that see all tokens before `reach`, also later ones."""

    sequence: int
    start: int
    end: int
    reach: int


@dataclass(slots=True)
class AdapterRows:
    """The adapters of each of T rows, at most K: those of a row come first."""

    slots: Tensor  # [T, K] int32, -1: none
    weights: Tensor  # [T, K] float32

    @classmethod
    def of(cls, requests: Sequence[Request], rows: Sequence[range], num_rows: int) -> AdapterRows | None:
        """Those of `requests`, each with its rows; None if no request has any."""
        most = max((len(request.adapters) for request in requests), default=0)
        if not most:
            return None
        slots, weights = np.full((num_rows, most), -1, np.int32), np.zeros((num_rows, most), np.float32)
        for request, own in zip(requests, rows, strict=True):
            for k, use in enumerate(request.adapters):
                slots[own.start : own.stop, k], weights[own.start : own.stop, k] = use.adapter.slot, use.weight
        return cls(torch.from_numpy(slots), torch.from_numpy(weights))

    def to(self, device: torch.device) -> AdapterRows:
        return AdapterRows(self.slots.to(device), self.weights.to(device))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of all chunks, one after the other.

    chunks      a: prefill 4 | b: decode | c: decode | d: prefill 3
    tokens      a0 a1 a2 a3  | b17       | c5        | d8 d9 d10
    positions    0  1  2  3  |  17       |  5        |  8  9  10

    There is no padding, with three exceptions. A static batch keeps the slots of finished requests: each is a sequence
    of one padding token. Padded attention needs a rectangle, in which every sequence is padded to the longest chunk:

    tokens      a0 a1 a2 a3  | b17 _ _ _ | c5 _ _ _  | d8 d9 d10 _

    And a step that is captured on a GPU has rows of padding, whose position is -1.

    Which rows belong to which sequence is described where it is read: in host memory (`build_batch`), or in device
    memory (the packer of the GPU runner), whose buffers a captured step reads again and again.
    """

    tokens: Tensor  # [T] int64, or int32 on a GPU
    positions: Tensor  # [T]: each token's place in its own sequence
    ragged: RaggedLayout | None = None  # The batch as host memory describes it.
    paged: PagedLayout | None = None  # The batch as device memory describes it.
    sampled_rows: Tensor | None = None  # [scored tokens + idle rows]: rows whose logits are computed
    read_rows: Tensor | None = None  # [read positions]: rows of prompts whose hidden states are needed, none sampled
    embeddings: Embeddings | None = None
    rotary_positions: Tensor | None = None  # [T, pairs]: in place of `positions`, of tokens in several directions
    mutual: Sequence[MutualSpan] = ()  # tokens of images that see each other
    recurrent: RecurrentStep | None = None  # needed by models with recurrent layers
    adapters: AdapterRows | None = None  # None: all rows are those of the base model
    num_padding: int = 0  # how many of the T tokens are padding, where the host knows

    @property
    def layout(self) -> RaggedLayout:
        """Where the sequences are, for a reader in host memory."""
        assert self.ragged is not None, "the batch is described in device memory only"
        return self.ragged

    @property
    def needed_rows(self) -> Tensor | None:
        """Rows whose hidden states are needed: sampled ones, then read ones. None: all rows, in order."""
        assert self.sampled_rows is not None
        assert self.read_rows is not None
        if len(self.sampled_rows) == len(self.tokens):
            return None
        return torch.cat([self.sampled_rows, self.read_rows])


def build_batch(
    plan: StepPlan,
    storage: KVStorage,
    device: torch.device,
    *,
    states: StateStorage | None = None,
    rectangular: bool = False,
) -> StepBatch:
    """The batch of a plan. With `states`, its sequences read and write those of recurrent layers."""
    few = not plan.idle_rows and all(chunk.count == 1 and chunk.samples for chunk in plan.chunks)
    batch = _single_tokens(plan, storage, device) if few else _all_tokens(plan, storage, device, rectangular)
    adapters = _adapter_rows(plan, batch.layout)
    if adapters is not None:
        batch = replace(batch, adapters=adapters.to(device))
    return batch if states is None else replace(batch, recurrent=_recurrent_step(plan, batch.layout, states, device))


def _adapter_rows(plan: StepPlan, layout: RaggedLayout) -> AdapterRows | None:
    requests = [chunk.request for chunk in plan.chunks]
    if not any(request.adapters for request in requests):
        return None
    starts = layout.offsets
    rows = [range(starts[i], starts[i] + chunk.count) for i, chunk in enumerate(plan.chunks)]
    return AdapterRows.of(requests, rows, starts[-1])


def _recurrent_step(plan: StepPlan, layout: RaggedLayout, storage: StateStorage, device: torch.device) -> RecurrentStep:
    """The states that the sequences, chunks and then idle rows, read and write. Chunks of a plan without states begin
    with zeros, and theirs are not kept."""
    starts = np.asarray(layout.offsets, np.int32)
    read = np.full(len(starts) - 1, NO_SLOT, np.int32)
    write = np.full(int(starts[-1]), NO_SLOT, np.int32)
    for index, states in enumerate(plan.states):
        read[index] = states.read
        for row, slot in states.writes:
            write[starts[index] + row] = slot
    first, second, third = (torch.from_numpy(array).to(device) for array in (starts, read, write))
    return RecurrentStep(RecurrentBatch(first, second, third, longest=int(np.diff(starts).max())), storage)


def _all_tokens(plan: StepPlan, storage: KVStorage, device: torch.device, rectangular: bool) -> StepBatch:
    chunks, idle, block_size, scratch = plan.chunks, plan.idle_rows, storage.block_size, storage.scratch_block
    starts = np.array([chunk.start for chunk in chunks] + [0] * idle)
    counts = np.array([chunk.count for chunk in chunks] + [1] * idle)
    num_rows = np.full_like(counts, counts.max()) if rectangular else counts
    offsets = [0, *accumulate(num_rows.tolist())]
    sequences = np.repeat(np.arange(len(counts)), num_rows)  # The sequence of each row.
    places = np.arange(offsets[-1]) - np.array(offsets)[sequences]
    filled = places < counts[sequences]
    positions = np.where(filled, starts[sequences] + places, 0)
    described = []
    for number in range(1 + len(chunks[0].beside) if chunks else 1):
        tables = table_array([*(_table(chunk, number) for chunk in chunks), *([[scratch]] * idle)])
        blocks = np.where(filled, tables[sequences, positions // block_size], scratch).astype(np.int64)
        slots = torch.from_numpy(blocks * block_size + positions % block_size)
        described.append(BlockTables(torch.from_numpy(tables).to(device), slots.to(device)))
    tokens = np.full(offsets[-1], PADDING_TOKEN, dtype=np.int64)
    tokens[filled & (sequences < len(chunks))] = [token for chunk in chunks for token in chunk.tokens]
    sampled = [
        offsets[i] + chunk.count - behind for i, chunk in enumerate(chunks) for behind in range(chunk.num_scored, 0, -1)
    ]
    read = [offsets[i] + position - chunk.start for i, chunk in enumerate(chunks) for position in chunk.read]
    return StepBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        sampled_rows=torch.tensor(sampled + offsets[len(chunks) : -1], dtype=torch.int64, device=device),
        read_rows=torch.tensor(read, dtype=torch.int64, device=device),
        ragged=RaggedLayout(
            offsets=offsets,
            starts=starts.tolist(),
            ends=(starts + counts).tolist(),
            tables=described[0].tables,
            slot_mapping=described[0].slot_mapping,
            beside=described[1:],
        ),
        num_padding=len(tokens) - plan.num_tokens,
    )


def _single_tokens(plan: StepPlan, storage: KVStorage, device: torch.device) -> StepBatch:
    """The batch of a plan whose chunks are single tokens that are sampled: most steps, built in a few operations."""
    chunks, size = plan.chunks, storage.block_size
    starts = [chunk.start for chunk in chunks]
    tables = table_array([chunk.table for chunk in chunks])
    numbers = np.array(
        [
            [chunk.request.tokens[chunk.start] for chunk in chunks],
            starts,
            [chunk.table[chunk.start // size] * size + chunk.start % size for chunk in chunks],
            range(len(chunks)),
        ]
    )
    tokens, positions, slots, rows = torch.from_numpy(numbers).to(device)
    return StepBatch(
        tokens=tokens,
        positions=positions,
        sampled_rows=rows,
        read_rows=rows[:0],
        ragged=RaggedLayout(
            offsets=range(len(chunks) + 1),
            starts=starts,
            ends=[start + 1 for start in starts],
            tables=torch.from_numpy(tables).to(device),
            slot_mapping=slots,
            beside=[_single_slots(chunks, number, size, device) for number in range(1, 1 + len(chunks[0].beside))],
        ),
    )


def _single_slots(chunks: Sequence[Chunk], number: int, size: int, device: torch.device) -> BlockTables:
    tables = [chunk.beside[number - 1] for chunk in chunks]
    slots = [
        table[chunk.start // size] * size + chunk.start % size for chunk, table in zip(chunks, tables, strict=True)
    ]
    return BlockTables(torch.from_numpy(table_array(tables)).to(device), torch.tensor(slots, device=device))


def _table(chunk: Chunk, number: int) -> Sequence[int]:
    return chunk.beside[number - 1] if number else chunk.table


def table_array(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Block tables as rows of one array, as wide as the longest, with zeros behind the others."""
    array = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(array, tables, strict=True):
        row[: len(table)] = table
    return array
