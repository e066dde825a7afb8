"""A draft head with 8-bit weights on the CPU: all drafts of a step are one call of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import table_array
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage
from chairlift.kernels.cpu.attention_work import AttentionWork, work_by_rows
from chairlift.kernels.cpu.decoder import Step
from chairlift.kernels.cpu.draft import (
    Choices,
    DraftBuffers,
    DraftedTokens,
    HeadWeights,
    KnownTokens,
    draft,
    store_keys_values,
)
from chairlift.kernels.cpu.int8 import PackedWeight
from chairlift.kernels.cpu.threads import the_team
from chairlift.layers.rope import Rope
from chairlift.models.programs.fuse_cpu import FusedCPULayers
from chairlift.speculation.drafter import DraftTask


class FusedHead:
    def __init__(
        self,
        decoder: FusedCPULayers,
        layer: AttentionLayer,
        rope: Rope,
        joint: PackedWeight | None,
        mix: PackedWeight,
        head: PackedWeight,
        embedded: Tensor,
    ) -> None:
        """`embedded` [draft vocab, hidden]: the tokens that can be drafted, each of mean square one."""
        self._decoder = decoder
        self._layer = layer
        self._inv_freq = np.array(rope.inv_freq, dtype=np.float32)
        self._rope_scale = np.float32(rope.scale)
        self._cos = self._sin = np.empty((0, len(rope.inv_freq)), dtype=np.float32)  # It grows with the positions.
        none = PackedWeight.empty(1, 0, 1).layer(0)
        rows = embedded.bfloat16().contiguous().view(torch.uint16).numpy()
        self._weights = HeadWeights(decoder.network, none if joint is None else joint, mix, head, rows)
        self._scratch: DraftBuffers | None = None

    def draft(
        self,
        tasks: Sequence[DraftTask],
        starts: Sequence[int],
        embedded: np.ndarray,
        features: np.ndarray,
        storage: KVStorage,
    ) -> Choices:
        """The task of the greatest length comes first. starts [tasks]: the first known token of each that the head has
        not computed. embedded [T, hidden], features [T, ...]: of all these tokens."""
        tables = table_array([task.table for task in tasks])
        spans = [range(start, task.request.num_known) for start, task in zip(starts, tasks, strict=True)]
        known = self._known_tokens(spans, embedded, features, tables, storage)
        drafted = self._drafted_tokens(tasks, tables, storage.block_size, embedded.shape[1])
        least = np.array(
            [[task.min_chance for task in tasks], [task.min_chance_to_extend for task in tasks]], dtype=np.float32
        )
        chances = np.array([task.chances for task in tasks], dtype=np.float32)
        choices = Choices.none_yet(tasks[0].length, least, chances)
        scratch = self._scratch_for(len(embedded), len(tasks), features.shape[1])
        buffers = self._decoder.room_for(*embedded.shape)
        the_team().run(draft, self._weights, known, drafted, buffers, scratch, choices)
        return choices

    def store(
        self,
        embedded: np.ndarray,
        token_features: Tensor,
        token_positions: Tensor,
        token_slots: Tensor,
        storage: KVStorage,
    ) -> None:
        """Store the keys and values of tokens [T], behind which nothing is drafted, in these slots."""
        features, positions, slots = (each.numpy() for each in (token_features, token_positions, token_slots))
        no_table = np.zeros((1, 1), dtype=np.int32)
        work = self._work(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))
        step = self._step(embedded, positions, slots, no_table, work, storage)
        known = KnownTokens(step, embedded, features, np.empty(0, dtype=np.int64))
        scratch = self._scratch_for(len(embedded), 1, features.shape[1])
        the_team().run(store_keys_values, self._weights, known, self._decoder.room_for(*embedded.shape), scratch)

    def _known_tokens(
        self,
        spans: Sequence[range],
        embedded: np.ndarray,
        features: np.ndarray,
        tables: np.ndarray,
        storage: KVStorage,
    ) -> KnownTokens:
        rows = [(index, position) for index, span in enumerate(spans) for position in span]
        sequences, positions = np.array(rows).T
        slots = _slots(tables, sequences, positions, storage.block_size)
        step = self._step(embedded, positions, slots, tables, self._work(sequences, positions + 1), storage)
        return KnownTokens(step, embedded, features, np.cumsum([len(span) for span in spans]) - 1)

    def _step(
        self,
        embedded: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        tables: np.ndarray,
        work: AttentionWork,
        storage: KVStorage,
    ) -> Step:
        cos, sin = self._angles(positions[None])
        keys, values, places = self._decoder.stored(storage)
        nothing = np.empty((0, *embedded.shape), dtype=np.float32)
        x = np.empty_like(embedded)
        return Step(x, cos, sin, slots[None], keys, values, tables[None], places, work, nothing, np.arange(len(x)), x)

    def _drafted_tokens(
        self, tasks: Sequence[DraftTask], tables: np.ndarray, block_size: int, hidden: int
    ) -> DraftedTokens:
        """Place p holds the token behind p others and all known ones. The last draft token is not computed."""
        ends, lengths = np.array([(task.request.num_known, task.length) for task in tasks]).T
        places = np.arange(lengths[0] - 1)[:, None]
        wanted = places < lengths - 1  # [P, R]
        positions = np.where(wanted, ends + places, 0)
        every = np.arange(len(tasks))
        cos, sin = self._angles(positions)
        work = self._work(every, ends + np.maximum(lengths - 1, 1))
        rows, requests = work.pieces.rows, wanted.sum(axis=1)
        return DraftedTokens(
            x=np.empty((len(tasks), hidden), dtype=np.float32),
            cos=cos,
            sin=sin,
            slots=_slots(tables, every, positions, block_size),
            tables=tables[None],
            work=work,
            lengths=ends[rows] + places + 1,
            pieces=np.searchsorted(rows, requests),
            requests=requests,
        )

    def _work(self, sequences: np.ndarray, lengths: np.ndarray) -> AttentionWork:
        return work_by_rows(sequences.tolist(), lengths.tolist(), self._layer.num_heads, self._layer.head_dim)

    def _angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[P, R] -> cos, sin [P, R, pairs]."""
        longest = int(positions.max(initial=0)) + 1
        if longest > len(self._cos):  # a table, since most calls look up the same positions
            angles = np.arange(2 * longest, dtype=np.float32)[:, None] * self._inv_freq
            self._cos, self._sin = np.cos(angles) * self._rope_scale, np.sin(angles) * self._rope_scale
        return self._cos[positions], self._sin[positions]

    def _scratch_for(self, tokens: int, requests: int, features: int) -> DraftBuffers:
        had = self._scratch
        if had is None or len(had.joined) < tokens or len(had.states) < requests:
            if had is not None:
                tokens, requests = max(tokens, len(had.joined)), max(requests, len(had.states))
            vocab, hidden = self._weights.embedded.shape
            self._scratch = had = DraftBuffers.empty(tokens, requests, hidden, features, vocab)
        return had


def _slots(tables: np.ndarray, sequences: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    blocks = tables[sequences, positions // block_size].astype(np.int64)
    slots: np.ndarray = blocks * block_size + positions % block_size
    return slots
