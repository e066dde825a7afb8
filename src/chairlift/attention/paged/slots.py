"""Rows of the device's tables: what it keeps of each request from step to step, and what it has not been sent yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.core.sampling.params import MIN_TEMPERATURE


@dataclass(slots=True)
class Slot:
    """One row of the device's tables, held by one request."""

    index: int
    generation: int = -1  # that of the request when its table was sent
    blocks_sent: int = 0
    first: int = 0  # the first position that was computed since then


class Slots:
    """Assigns rows of the device's tables to requests.

    There are more than twice as many as requests in a batch: the least recently used row is then in neither of the
    last two steps, so no step in flight refers to it when it is assigned to another request.
    """

    def __init__(self, max_requests: int, table_width: int, block_size: int) -> None:
        self.count = 2 * max_requests + 2
        self.table_width = table_width
        self.block_size = block_size
        self.padding = self.count  # one more row, which belongs to no request
        self.padding_cell = self.padding * table_width
        self._free = list(range(self.count))
        self._held: OrderedDict[str, Slot] = OrderedDict()
        self.temperature = np.zeros(self.count, np.float32)
        self.top_k = np.zeros(self.count, np.int32)
        self.top_p = np.ones(self.count, np.float32)
        self.min_p = np.zeros(self.count, np.float32)
        self.seed = np.zeros(self.count, np.uint64)
        self.num_prompt = np.zeros(self.count, np.int32)
        self.on_host = np.zeros(self.count, np.bool_)

    def of(self, request: Request) -> Slot:
        """The slot of a request, assigned if it has none."""
        slot = self._held.get(request.id)
        if slot is None:
            slot = Slot(self._free.pop() if self._free else self._held.popitem(last=False)[1].index)
            self._held[request.id] = slot
            self._set_sampling(slot.index, request)
        else:
            self._held.move_to_end(request.id)
        return slot

    def held(self, request: Request) -> Slot | None:
        """The slot that has what was computed for a request since it was last admitted; None if there is none."""
        slot = self._held.get(request.id)
        return slot if slot is not None and slot.generation == request.generation else None

    def release(self, request_id: str) -> None:
        slot = self._held.pop(request_id, None)
        if slot is not None:
            self._free.append(slot.index)

    def _set_sampling(self, index: int, request: Request) -> None:
        params = request.params
        self.temperature[index] = 0.0 if params.temperature < MIN_TEMPERATURE else params.temperature
        self.top_k[index] = params.top_k
        self.top_p[index] = params.top_p
        self.min_p[index] = params.min_p
        self.seed[index] = request.seed
        self.num_prompt[index] = request.num_prompt
        self.on_host[index] = params.needs_host

    def table_changes(self, slot: Slot, chunk: Chunk, cells: list[int], blocks: list[int]) -> None:
        """Append the entries of `chunk`'s block table that the device does not have yet."""
        table = chunk.table
        if slot.generation != chunk.generation:
            slot.generation, slot.blocks_sent, slot.first = chunk.generation, 0, chunk.start
        elif chunk.copies:
            slot.blocks_sent = 0
        self._send_rest(slot, table, cells, blocks)
        if chunk.drafts:  # blocks that only wrong drafts needed are given back, and may be other blocks next time
            slot.blocks_sent = min(len(table), -(-chunk.known_end // self.block_size))

    def draft_changes(
        self, slot: Slot, request: Request, table: Sequence[int], cells: list[int], blocks: list[int]
    ) -> None:
        """The same before a step, for a request whose block table has room for draft tokens."""
        if slot.generation != request.generation:
            slot.generation, slot.blocks_sent, slot.first = request.generation, 0, request.num_known - 1
        self._send_rest(slot, table, cells, blocks)
        slot.blocks_sent = min(len(table), -(-request.num_known // self.block_size))

    def _send_rest(self, slot: Slot, table: Sequence[int], cells: list[int], blocks: list[int]) -> None:
        sent, count = slot.blocks_sent, len(table)
        if sent < count:
            first = slot.index * self.table_width
            cells.extend(range(first + sent, first + count))
            blocks.extend(table[sent:count])
            slot.blocks_sent = count
