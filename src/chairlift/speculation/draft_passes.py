"""All passes of a draft network as one captured graph: one copy to the device, one replay, one copy back.

    known       x7 x8 | y4 | z5 z6 z7      tokens that the network has not computed yet, A_FEW rows for each request
    pass 1      -> x9   y5   z8            draft tokens stay on the device, where the next pass reads them
    pass 2      -> x10  y6   z9
    ...

Which of them are verified is decided once all are read, so that the device never waits for the host in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import PagedLayout, StepBatch
from chairlift.attention.paged.slots import MIN_UPDATES, Sections, Slots, Staging
from chairlift.attention.storage import KVStorage
from chairlift.kernels.graphs import Graphs, StepKernels, memory_taken, round_up
from chairlift.speculation.drafter import DraftNetwork, DraftTask
from chairlift.speculation.head_states import RecentStates
from chairlift.speculation.proposers.base import A_FEW, LEVELS, Draft

REQUESTS = (1, 2, 4, 8, 16, 32, 64)  # Each has a graph; with more requests, passes are launched kernel by kernel.


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
    def padded_requests(self) -> int:
        """Aligned to 16 bytes for the kernels' loads."""
        return -(-self.requests // 4) * 4

    @property
    def sections(self) -> Sections:
        """The arrays of a draft in the buffer of its inputs."""
        return _sections(self)


@lru_cache(maxsize=64)
def _sections(shape: DraftShape) -> Sections:
    updates = max(MIN_UPDATES, 2 * shape.requests)
    later = (shape.places - 1, shape.padded_requests)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("token", "slot", "position", "start", "count", "state_row"), (shape.rows,)
    )
    shapes |= dict.fromkeys(("last_row", "next_slot"), (shape.requests,))
    shapes |= dict.fromkeys(("next_position", "next_start", "next_count"), later)
    shapes |= dict.fromkeys(("update_cell", "update_block"), (updates,))
    return Sections(shapes)


@dataclass(frozen=True, slots=True)
class ComputedDrafts:
    """Draft tokens on the device, and the levels of confidence in them."""

    choices: Tensor  # [2, places, requests and padding] int32


@dataclass(eq=False, repr=False)
class DraftPasses:
    """Captures and replays the passes of a draft network; one draft is read before the next one is packed."""

    network: DraftNetwork
    attention: AttentionBackend
    storage: KVStorage
    slots: Slots
    recent: RecentStates | None  # the states that the network reads, if any
    places: int  # draft tokens of a request
    has_room: InitVar[Callable[[int], bool]]

    def __post_init__(self, has_room: Callable[[int], bool]) -> None:
        device = self._device = self.slots.tables.device
        self._sizes = [size for size in REQUESTS if size < 2 * self.slots.max_requests]
        shapes = [DraftShape(size, self.places) for size in self._sizes]
        largest = shapes[-1]
        self._inputs = torch.zeros(largest.sections.size, dtype=torch.int32, device=device)
        self._staging = Staging(largest.sections.size, 2 * self.places * largest.padded_requests, device)
        self._padding: dict[DraftShape, Tensor] = {}
        self._rows = torch.arange(largest.rows, dtype=torch.int32, device=device)
        self.kernels: StepKernels[DraftShape] = StepKernels(self.forward_padding, device)
        self.graphs: Graphs[DraftShape, ComputedDrafts] = Graphs(
            lambda shape: memory_taken(lambda: self.forward_padding(shape), device),
            self._forward,
            shapes,
            has_room,
            self.kernels,
        )

    def is_typical(self, num_requests: int) -> bool:
        """Whether the next drafts of `num_requests` take as long as later ones; to be called before `draft`."""
        shape = self._shape(num_requests)
        return shape is None or self.graphs.is_typical(shape)

    @torch.inference_mode()
    def draft(self, tasks: Sequence[DraftTask]) -> list[Draft] | None:
        """The likeliest tokens of all places; None if the passes for as many requests are not captured."""
        shape = self._shape(len(tasks))
        graph = None if shape is None else self.graphs.find(shape)
        if shape is None or graph is None:
            return None
        self._send(tasks, shape)
        computed = graph.replay().choices
        choices = self._staging.results[: computed.numel()].view(computed.shape)
        choices.copy_(computed, non_blocking=True)
        self._staging.finished.record()
        for task in tasks:
            self.network.computed(task.request, task.request.num_known + task.length - 1)
        self._staging.finished.synchronize()
        tokens, levels = choices.transpose(1, 2).tolist()
        return [
            Draft(some[: task.length], sure[: task.length])
            for task, some, sure in zip(tasks, tokens, levels, strict=False)
        ]

    def _shape(self, num_requests: int) -> DraftShape | None:
        size = round_up(num_requests, self._sizes)
        return None if size is None else DraftShape(size, self.places)

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def _send(self, tasks: Sequence[DraftTask], shape: DraftShape) -> None:
        """Write the requests into the buffer on the device: the tokens that the network has not computed, and where
        draft tokens go."""
        size, staged = shape.sections.size, self._staging.inputs
        staged[:size] = self._padding_of(shape)
        views = self._staging.views(shape.sections)
        self._write_known(tasks, views)
        _write_next(tasks, views)
        self._inputs[:size].copy_(staged[:size], non_blocking=True)

    @torch.inference_mode()
    def forward_padding(self, shape: DraftShape) -> ComputedDrafts:
        """Draft for no request, which loads the kernels."""
        self._inputs[: shape.sections.size].copy_(self._padding_of(shape))
        return self._forward(shape)

    def _padding_of(self, shape: DraftShape) -> Tensor:
        """Rows that belong to no request, which write nothing to the cache."""
        if shape not in self._padding:
            padding = np.zeros(shape.sections.size, np.int32)
            views = shape.sections.on_host(padding)
            for name in ("position", "next_position"):
                views[name][:] = -1
            views["update_cell"][:] = self.slots.padding_cell
            self._padding[shape] = torch.from_numpy(padding)
        return self._padding[shape]

    def _write_known(self, tasks: Sequence[DraftTask], views: Mapping[str, np.ndarray]) -> None:
        cells: list[int] = []
        blocks: list[int] = []
        tokens: list[int] = []
        states: list[int] = []
        slots: list[int] = []
        firsts: list[int] = []
        for task in tasks:
            request = task.request
            slot = self.slots.of(request)
            self.slots.draft_changes(slot, request, task.table, cells, blocks)
            first, end = self.network.first_position(request), request.num_known
            slots.append(slot.index)
            firsts.append(first)
            tokens += request.tokens[first:end]
            if self.recent is not None:
                states += self.recent.take_rows(request, first, end)
        counts = np.array([task.request.num_known for task in tasks]) - np.array(firsts)
        owner = np.repeat(np.arange(len(tasks)), counts)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # the place in its request
        rows = A_FEW * owner + offsets
        views["token"][rows] = tokens
        views["slot"][rows] = np.array(slots)[owner]
        views["position"][rows] = views["start"][rows] = np.array(firsts)[owner] + offsets
        views["count"][rows] = 1
        if states:
            views["state_row"][rows] = states
        views["last_row"][: len(tasks)] = A_FEW * np.arange(len(tasks)) + counts - 1
        views["next_slot"][: len(tasks)] = slots
        if len(cells) > len(views["update_cell"]):
            self.slots.send(cells, blocks)
        elif cells:
            views["update_cell"][: len(cells)], views["update_block"][: len(cells)] = cells, blocks

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _forward(self, shape: DraftShape) -> ComputedDrafts:
        """All passes as kernels that read nothing but device memory: what a graph captures."""
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.sampling import likeliest

        network, slots, view = self.network, self.slots, shape.sections.on_device(self._inputs)
        size = shape.requests
        tokens = begin_step(
            view["token"], view["slot"], slots.last_token, view["update_cell"], view["update_block"], slots.tables
        )
        choices = torch.empty(2, shape.places, shape.padded_requests, dtype=torch.int32, device=self._device)
        states = torch.zeros(1, 0, device=self._device) if self.recent is None else self.recent.ring
        features = states.index_select(0, view["state_row"])
        batch = self._batch(tokens, view["slot"], view["position"], view["start"], view["count"])
        attention = self.attention.begin(batch, self.storage)
        computed = network.run_pass(batch, features, view["last_row"], attention)
        for place in range(shape.places):
            if place:
                where = [view[f"next_{name}"][place - 1, :size] for name in ("position", "start", "count")]
                batch = self._batch(choices[0, place - 1, :size], view["next_slot"], *where, one_per_request=True)
                attention = self.attention.begin(batch, self.storage)
                computed = network.run_pass(batch, computed.states, None, attention)
            likeliest(computed.scores, network.token_ids, choices[0, place, :size], choices[1, place, :size], LEVELS)
        return ComputedDrafts(choices)

    def _batch(
        self,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        starts: Tensor,
        counts: Tensor,
        *,
        one_per_request: bool = False,
    ) -> StepBatch:
        """A batch of single tokens."""
        layout = PagedLayout(
            slots=slots,
            positions=positions,
            tables=self.slots.parts[0],
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
        return StepBatch(tokens, positions, paged=layout)


def _write_next(tasks: Sequence[DraftTask], views: Mapping[str, np.ndarray]) -> None:
    """Write where the draft tokens of each request are computed; its last one is not."""
    places = np.arange(len(views["next_count"]))[:, None]
    needed = places + 1 < np.array([task.length for task in tasks])
    positions = np.array([task.request.num_known for task in tasks]) + places
    views["next_position"][:, : len(tasks)] = np.where(needed, positions, -1)
    views["next_start"][:, : len(tasks)] = np.where(needed, positions, 0)
    views["next_count"][:, : len(tasks)] = needed
