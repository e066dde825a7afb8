"""A draft head with 8-bit weights on the CPU, all guesses of a step one call of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.base import AttentionLayer
from chairlift.attention.paged_cpu import PagedCPUStep
from chairlift.kernels.cpu_attention import split_work
from chairlift.kernels.cpu_draft import Certain, Guessed, HeadWeights, Room, guess
from chairlift.kernels.cpu_int8 import PackedWeight
from chairlift.kernels.cpu_threads import the_team
from chairlift.layers.rope import Rope
from chairlift.models.fused_cpu import FusedCPUDecoder


class FusedHead:
    def __init__(
        self,
        decoder: FusedCPUDecoder,
        layer: AttentionLayer,
        rope: Rope,
        joint: PackedWeight | None,
        mix: PackedWeight,
        head: PackedWeight,
        embedded: Tensor,
    ) -> None:
        """`embedded` [draft vocab, hidden]: the tokens that can be guessed, each of mean square one."""
        self._decoder = decoder
        self._layer = layer
        self._inv_freq = np.array(rope.inv_freq, dtype=np.float32)
        self._rope_scale = np.float32(rope.scale)
        none = PackedWeight.empty(1, 0, 1).layer(0)
        rows = embedded.bfloat16().contiguous().view(torch.uint16).numpy()
        self._weights = HeadWeights(decoder.network, none if joint is None else joint, mix, head, rows)
        self._room: Room | None = None

    def guess(
        self, embedded: Tensor, features: Tensor, attend: PagedCPUStep, last_rows: Tensor, lengths: Sequence[int]
    ) -> np.ndarray:
        """embedded [T, hidden], features [T, ...] of the tokens that `attend` is for; `lengths`: how many guesses each
        request wants, in falling order -> [requests, most], of which each has as many as it wants."""
        layout = attend.layout
        starts = np.concatenate([np.arange(*ends) for ends in zip(layout.starts, layout.ends, strict=True)])
        x = torch.empty_like(embedded)
        step = self._decoder.step(x, *self._angles(starts[None]), attend)
        certain = Certain(step, embedded.numpy(), features.numpy(), last_rows.numpy())
        guessed = self._guessed(attend, np.array(layout.ends), np.array(lengths), x.shape[1])
        rows = max(len(x), len(lengths))
        chosen = np.zeros((len(lengths), lengths[0]), dtype=np.int64)
        buffers = self._decoder.room_for(rows, x.shape[1])
        the_team().run(guess, self._weights, certain, guessed, buffers, self._room_for(rows, features.shape[1]), chosen)
        return chosen

    def _guessed(self, attend: PagedCPUStep, known: np.ndarray, lengths: np.ndarray, hidden: int) -> Guessed:
        """Place p holds the token behind `known` + p others. Of the last, none is computed."""
        places = np.arange(lengths[0] - 1)[:, None]
        wanted = places < lengths - 1  # [P, R]
        positions = np.where(wanted, known + places, 0)
        tables = attend.layout.tables.numpy()
        block_size = attend.storage.block_size
        blocks = tables[np.arange(len(known)), positions // block_size].astype(np.int64)
        ends = known + np.maximum(lengths - 1, 1)
        work = split_work(np.arange(len(known) + 1), ends - 1, ends, self._layer.num_heads, self._layer.head_dim)
        rows = work.pieces.rows
        requests = wanted.sum(axis=1)
        return Guessed(
            np.empty((len(known), hidden), dtype=np.float32),
            *self._angles(positions),
            blocks * block_size + positions % block_size,
            tables,
            work,
            known[rows] + places + 1,
            np.searchsorted(rows, requests),
            requests,
        )

    def _angles(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[P, R] -> cos, sin [P, R, pairs]."""
        angles = positions[..., None].astype(np.float32) * self._inv_freq
        return np.cos(angles) * self._rope_scale, np.sin(angles) * self._rope_scale

    def _room_for(self, rows: int, features: int) -> Room:
        if self._room is None or len(self._room.states) < rows:
            vocab, hidden = self._weights.embedded.shape
            self._room = Room.empty(rows, hidden, features, vocab)
        return self._room
