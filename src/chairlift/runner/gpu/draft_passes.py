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

import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import PagedLayout, StepBatch
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage
from chairlift.kernels.graphs import Graphs, StepKernels, memory_taken
from chairlift.runner.gpu.draft_inputs import DraftInputs, DraftShape
from chairlift.runner.gpu.recent_states import RecentStates
from chairlift.runner.gpu.shapes import device_event, round_up
from chairlift.speculation.control.proposer import LEVELS, Draft
from chairlift.speculation.draft_network import DraftNetwork
from chairlift.speculation.draft_proposer import DraftTask

REQUESTS = (1, 2, 4, 8, 16, 32, 64)  # that graphs are captured for; with more, passes are launched kernel by kernel


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
        recent: RecentStates | None,
        max_requests: int,
        places: int,
        has_room: Callable[[int], bool],
    ) -> None:
        """`slots`, `tables`, `last_token`: those of the runner. `recent`: the states that the network reads, if any."""
        self._network, self._attention, self._storage = network, attention, storage
        self._tables, self._last_token = tables, last_token
        device = self._device = tables.device
        self._places = places
        self._sizes = [size for size in REQUESTS if size < 2 * max_requests]
        shapes = [DraftShape(size, places) for size in self._sizes]
        largest, pinned = shapes[-1], device.type == "cuda"
        self._inputs = DraftInputs(network, slots, tables, largest, recent)
        self._recent = recent
        self._rows = torch.arange(largest.rows, dtype=torch.int32, device=device)
        self._found = torch.zeros(2 * places * largest.padded_requests, dtype=torch.int32, pin_memory=pinned)
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
        self._inputs.send(tasks, shape)
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

    @torch.inference_mode()
    def forward_padding(self, shape: DraftShape) -> ComputedDrafts:
        """Draft for no request, which loads the kernels."""
        self._inputs.send_padding(shape)
        return self._forward(shape)

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _forward(self, shape: DraftShape) -> ComputedDrafts:
        """All passes as kernels that read nothing but device memory: what a graph captures."""
        from chairlift.kernels.triton.layers import begin_step
        from chairlift.kernels.triton.likeliest import likeliest

        network, view = self._network, shape.device_views(self._inputs.buffer)
        size = shape.requests
        tokens = begin_step(
            view["token"], view["slot"], self._last_token, view["update_cell"], view["update_block"], self._tables
        )
        found = torch.empty(2, shape.places, shape.padded_requests, dtype=torch.int32, device=self._device)
        states = torch.zeros(1, 0, device=self._device) if self._recent is None else self._recent.ring
        features = states.index_select(0, view["state_row"])
        batch = self._batch(tokens, view["slot"], view["position"], view["start"], view["count"])
        attention = self._attention.begin(batch, self._storage)
        one = network.first_pass(batch, features, view["last_row"], attention)
        for place in range(shape.places):
            if place:
                where = [view[f"next_{name}"][place - 1, :size] for name in ("position", "start", "count")]
                batch = self._batch(found[0, place - 1, :size], view["next_slot"], *where, one_per_request=True)
                attention = self._attention.begin(batch, self._storage)
                one = network.next_pass(batch, one.states, attention)
            likeliest(one.scores, network.token_ids, found[0, place, :size], found[1, place, :size], LEVELS)
        return ComputedDrafts(found)

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
        return StepBatch(tokens, positions, paged=layout)

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
        self._capture(self.graphs.likely)

    def capture_missed(self) -> None:
        """Capture the graphs of the numbers of requests that occurred."""
        self._capture(self.graphs.missed)

    def _capture(self, shapes: Sequence[DraftShape]) -> None:
        self.kernels.wait(shapes)
        for shape in shapes:
            self.graphs.capture(shape)
