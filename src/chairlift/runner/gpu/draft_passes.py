"""All passes of a draft network as one captured graph: one copy to the device, one replay, one copy back.

    known       x7 x8 | y4 | z5 z6 z7      tokens that the network has not computed yet, A_FEW rows for each request
    pass 1      -> x9   y5   z8            draft tokens stay on the device, where the next pass reads them
    pass 2      -> x10  y6   z9
    ...

Which of them are verified is decided once all are read, so that the device never waits for the host in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.interface import PagedBatch
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.plan import Chunk
from chairlift.runner.device_memory import memory_taken
from chairlift.runner.gpu.graphs import Graphs
from chairlift.runner.gpu.shapes import MIN_UPDATES, round_up
from chairlift.runner.gpu.slots import Slots
from chairlift.runner.gpu.staging import device_event
from chairlift.runner.gpu.step_kernels import StepKernels
from chairlift.speculation.control.proposer import LEVELS, Draft
from chairlift.speculation.draft_network import A_FEW, DraftNetwork
from chairlift.speculation.draft_proposer import DraftTask

REQUESTS = (1, 2, 4, 8, 16, 32, 64)  # that graphs are captured for; with more, passes are launched kernel by kernel


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of a graph."""

    requests: int
    places: int

    @property
    def rows(self) -> int:
        """Rows of the first pass."""
        return A_FEW * self.requests

    @property
    def sections(self) -> dict[str, slice]:
        """The part of the input buffer that each array takes."""
        return _sections(self)

    @property
    def size(self) -> int:
        return int(next(reversed(self.sections.values())).stop)


@lru_cache(maxsize=64)
def _sections(shape: DraftShape) -> dict[str, slice]:
    updates = max(MIN_UPDATES, 2 * shape.requests)
    sizes = dict.fromkeys(("token", "slot", "position", "start", "count", "feature_row"), shape.rows)
    sizes |= dict.fromkeys(("last_row", "next_slot"), shape.requests)
    for place in range(1, shape.places):
        sizes |= dict.fromkeys((f"position_{place}", f"start_{place}", f"count_{place}"), shape.requests)
    sizes |= dict.fromkeys(("update_cell", "update_block"), updates)
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = slice(at, at + size)
        at += -(-size // 4) * 4  # aligned to 16 bytes for the kernels' loads
    return found


@dataclass(frozen=True, slots=True)
class ComputedDrafts:
    """Draft tokens on the device, and the levels of confidence in them."""

    found: Tensor  # [2, places, requests and padding] int32


class DraftPasses:
    """Captures and replays the passes of a draft network."""

    def __init__(
        self,
        network: DraftNetwork,
        attention: AttentionBackend,
        storage: KVStorage,
        slots: Slots,
        tables: Tensor,
        last_token: Tensor,
        *,
        dtype: torch.dtype,
        max_requests: int,
        places: int,
        has_room: Callable[[int], bool],
    ) -> None:
        """`slots`, `tables`, `last_token`: those of the runner. `dtype`: of the network's features."""
        self._network, self._attention, self._storage = network, attention, storage
        self._slots, self._tables, self._last_token = slots, tables, last_token
        device = self._device = tables.device
        self._places = places
        self._sizes = [size for size in REQUESTS if size < 2 * max_requests]
        shapes = [DraftShape(size, places) for size in self._sizes]
        largest, pinned = shapes[-1], device.type == "cuda"
        self._inputs = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self._staged = torch.zeros(largest.size, dtype=torch.int32, pin_memory=pinned)
        self._array = self._staged.numpy()
        self._features = torch.zeros(largest.rows, network.feature_size, dtype=dtype, device=device)
        self._rows = torch.arange(largest.rows, dtype=torch.int32, device=device)
        self._found = torch.zeros(2 * places * _padded(largest.requests), dtype=torch.int32, pin_memory=pinned)
        self._finished = device_event(device)
        self.kernels: StepKernels[DraftShape] = StepKernels(self.forward_padding, device)
        self.graphs: Graphs[DraftShape, ComputedDrafts] = Graphs(
            lambda shape: memory_taken(lambda: self.forward_padding(shape), device),
            self._forward,
            shapes,
            has_room,
            self.kernels.is_ready,
        )

    def is_typical(self, num_requests: int) -> bool:
        shape = self._shape(num_requests)
        return shape is None or self.graphs.is_typical(shape)

    @torch.inference_mode()
    def draft(self, tasks: Sequence[DraftTask]) -> list[Draft] | None:
        shape = self._shape(len(tasks))
        graph = None if shape is None else self.graphs.find(shape)
        if shape is None or graph is None:
            return None
        self._send(tasks, shape)
        computed = graph.replay()
        found = self._found[: computed.found.numel()].view(computed.found.shape)
        found.copy_(computed.found, non_blocking=True)
        self._finished.record()
        for task in tasks:
            self._network.drafted(task.request, task.length - 1)
        self._finished.synchronize()
        tokens, levels = found.transpose(1, 2).tolist()
        return [
            Draft(some[: task.length], sure[: task.length])
            for task, some, sure in zip(tasks, tokens, levels, strict=False)
        ]

    def _shape(self, num_requests: int) -> DraftShape | None:
        size = round_up(num_requests, self._sizes)
        return None if size is None else DraftShape(size, self._places)

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def _send(self, tasks: Sequence[DraftTask], shape: DraftShape) -> None:
        views = {name: self._array[section] for name, section in shape.sections.items()}
        _fill_padding(views, self._slots.padding_cell)
        cells: list[int] = []
        blocks: list[int] = []
        parts: list[Tensor] = []
        rows: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for index, task in enumerate(tasks):
            request = task.request
            chunk = _chunk(task)
            slot = self._slots.of(chunk)
            self._slots.table_changes(slot, chunk, cells, blocks)
            first, known = self._network.first_position(request), request.num_known
            parts += self._network.take(request)
            rows += range(A_FEW * index, A_FEW * index + known - first)
            tokens += request.tokens[first:known]
            positions += range(first, known)
            slots += [slot.index] * (known - first)
            views["last_row"][index] = rows[-1]
            views["next_slot"][index] = slot.index
        views["token"][rows], views["slot"][rows] = tokens, slots
        views["position"][rows] = views["start"][rows] = positions
        views["count"][rows] = 1
        views["feature_row"][rows] = range(len(rows))
        self._place_next(tasks, views)
        if len(cells) > len(views["update_cell"]):  # a long table at once is sent by itself
            where, what = sent([cells, blocks], self._device, torch.int32)
            self._tables.view(-1)[where] = what
        elif cells:
            views["update_cell"][: len(cells)], views["update_block"][: len(cells)] = cells, blocks
        if parts:
            torch.cat(parts, out=self._features[: len(rows)])
        self._inputs[: shape.size].copy_(self._staged[: shape.size], non_blocking=True)

    def _place_next(self, tasks: Sequence[DraftTask], views: dict[str, np.ndarray]) -> None:
        """Write where the draft tokens of each request are computed; its last one is not."""
        known = np.array([task.request.num_known for task in tasks], np.int32)
        lengths = np.array([task.length for task in tasks])
        for place in range(1, min(self._places, int(lengths.max()))):
            wanted = place < lengths
            positions = known + (place - 1)
            views[f"position_{place}"][: len(tasks)] = np.where(wanted, positions, -1)
            views[f"start_{place}"][: len(tasks)] = np.where(wanted, positions, 0)
            views[f"count_{place}"][: len(tasks)] = wanted

    @torch.inference_mode()
    def forward_padding(self, shape: DraftShape) -> ComputedDrafts:
        """Draft for no request, which loads the kernels."""
        padding = np.zeros(shape.size, np.int32)
        _fill_padding({name: padding[section] for name, section in shape.sections.items()}, self._slots.padding_cell)
        self._inputs[: shape.size].copy_(torch.from_numpy(padding))
        return self._forward(shape)

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _forward(self, shape: DraftShape) -> ComputedDrafts:
        """All passes as kernels that read nothing but device memory: what a graph captures."""
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.likeliest import likeliest

        network, view = self._network, {name: self._inputs[section] for name, section in shape.sections.items()}
        size = shape.requests
        tokens = begin_step(
            view["token"], view["slot"], self._last_token, view["update_cell"], view["update_block"], self._tables
        )
        found = torch.empty(2, shape.places, _padded(size), dtype=torch.int32, device=self._device)
        features = self._features.index_select(0, view["feature_row"])
        batch = self._batch(view["slot"], view["position"], view["start"], view["count"])
        attend = self._attention.attend(batch, self._storage)
        one = network.first_pass(tokens, features, view["position"], view["last_row"], attend)
        for place in range(shape.places):
            if place:
                where = [view[f"{name}_{place}"] for name in ("position", "start", "count")]
                batch = self._batch(view["next_slot"], *where, one_per_request=True)
                attend = self._attention.attend(batch, self._storage)
                one = network.next_pass(found[0, place - 1, :size], one.states, where[0], attend)
            likeliest(one.scores, network.token_ids, found[0, place, :size], found[1, place, :size], LEVELS)
        return ComputedDrafts(found)

    def _batch(
        self, slots: Tensor, positions: Tensor, starts: Tensor, counts: Tensor, *, one_per_request: bool = False
    ) -> PagedBatch:
        """A batch of single tokens."""
        return PagedBatch(
            slots=slots,
            positions=positions,
            tables=self._tables,
            chunk_slot=slots,
            chunk_row=self._rows[: len(slots)],
            chunk_start=starts,
            chunk_count=counts,
            num_single=len(slots),
            tile_chunk=self._rows[:0],
            tile_offset=self._rows[:0],
            tile_queries=1,
            one_per_request=one_per_request,
        )

    # ---- between steps ----------------------------------------------------------------------------------------------

    def prepare_next(self) -> bool:
        """Find out the kernels of a graph, for other processes to compile, or capture one whose kernels are compiled;
        False if there is nothing to do for now."""
        unknown = next((shape for shape in self.graphs.likely if not self.kernels.is_known(shape)), None)
        if unknown is not None:
            self.kernels.request([unknown])
            return True
        return self.graphs.capture_next()

    def capture_all(self) -> None:
        """Capture all graphs now."""
        self.kernels.wait(self.graphs.likely)
        for shape in self.graphs.likely:
            self.graphs.capture(shape)


def _padded(requests: int) -> int:
    return -(-requests // 4) * 4


def _chunk(task: DraftTask) -> Chunk:
    """The request with draft tokens: a table entry that only those need is sent again with the next step."""
    request, drafts = task.request, (0,) * task.length
    start, count = request.num_known - 1, 1 + task.length
    return Chunk(request, start, count, task.table, False, generation=request.generation, drafts=drafts)


def _fill_padding(views: dict[str, Any], padding_cell: int) -> None:
    """Rows that belong to no request write nothing to the cache."""
    for name, view in views.items():
        view[:] = -1 if name.startswith("position") else padding_cell if name == "update_cell" else 0
