"""What a device keeps of each request from step to step, and the buffers by which the host tells it what is new."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.storage import sent
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.core.sampling.params import MIN_TEMPERATURE

MIN_UPDATES = 8  # changed table entries that any captured step has room for


@dataclass(slots=True)
class Slot:
    """One row of the device's tables, held by one request."""

    index: int
    generation: int = -1  # The generation of the request when its table was sent.
    blocks_sent: int = 0
    blocks_sent_beside: int = 0  # The other block tables of its request.
    first: int = 0  # the first position that was computed since then


class Slots:
    """Tables on the device with a row for each request, its slot: its block table and its last token.

    There are more than twice as many as requests in a batch: the least recently used row is then in neither of the
    last two steps, so no step in flight refers to it when it is assigned to another request.
    """

    def __init__(
        self, max_requests: int, table_width: int, block_size: int, device: torch.device, num_tables: int = 1
    ) -> None:
        """`num_tables`: block tables of a request, where layers have different ones."""
        self.max_requests = max_requests
        self.count = 2 * max_requests + 2
        self.table_width = table_width
        self.block_size = block_size
        self.padding = self.count  # one more row, which belongs to no request
        self.padding_cell = self.padding * table_width
        # Kernels load faster from tables that begin at multiples of 16 bytes.
        self._rows = self.count + 1 if num_tables == 1 else -(-(self.count + 1) // 4) * 4
        self.tables = torch.zeros(num_tables * self._rows, table_width, dtype=torch.int32, device=device)
        self.parts = self.tables.split(self._rows)  # Each block table has a row for each slot.
        self.last_token = torch.zeros(self.count + 1, dtype=torch.int32, device=device)
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
            slot.generation, slot.first = chunk.generation, chunk.start
            slot.blocks_sent = slot.blocks_sent_beside = 0
        elif chunk.copies:
            slot.blocks_sent = slot.blocks_sent_beside = 0
        self._send_rest(slot, table, cells, blocks)
        for number, other in enumerate(chunk.beside, 1):
            first = (number * self._rows + slot.index) * self.table_width
            cells.extend(range(first + slot.blocks_sent_beside, first + len(other)))
            blocks.extend(other[slot.blocks_sent_beside :])
        slot.blocks_sent_beside = len(table)
        if chunk.drafts:  # blocks that only wrong drafts needed are given back, and may be other blocks next time
            slot.blocks_sent = slot.blocks_sent_beside = min(len(table), -(-chunk.known_end // self.block_size))

    def draft_changes(
        self, slot: Slot, request: Request, table: Sequence[int], cells: list[int], blocks: list[int]
    ) -> None:
        """The same before a step, for a request whose block table has room for draft tokens."""
        if slot.generation != request.generation:
            slot.generation, slot.first = request.generation, request.num_known - 1
            slot.blocks_sent = slot.blocks_sent_beside = 0
        self._send_rest(slot, table, cells, blocks)
        slot.blocks_sent = min(len(table), -(-request.num_known // self.block_size))

    def _send_rest(self, slot: Slot, table: Sequence[int], cells: list[int], blocks: list[int]) -> None:
        num_sent, count = slot.blocks_sent, len(table)
        if num_sent < count:
            first = slot.index * self.table_width
            cells.extend(range(first + num_sent, first + count))
            blocks.extend(table[num_sent:count])
            slot.blocks_sent = count

    def send(self, cells: Sequence[int], blocks: Sequence[int]) -> None:
        """Send entries of block tables by themselves: a long table at once, such as that of a prefix hit."""
        where, what = sent([cells, blocks], self.tables.device, torch.int32)
        self.tables.view(-1)[where] = what


class Sections:
    """The parts of a buffer that hold the arrays of a step, each aligned to 16 bytes for the kernels' loads."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], floats: Collection[str] = ()) -> None:
        """`shapes`: those of the arrays, by name; `floats`: which of them are float32, and not int32."""
        self._parts: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self._floats = floats
        start = 0
        for name, shape in shapes.items():
            self.size = start + math.prod(shape)
            self._parts[name] = slice(start, self.size), shape
            start = -(-self.size // 4) * 4

    def on_host(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        arrays = {name: buffer[part].reshape(shape) for name, (part, shape) in self._parts.items()}
        return arrays | {name: arrays[name].view(np.float32) for name in self._floats}

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        arrays = {name: buffer[part] for name, (part, _) in self._parts.items()}
        arrays |= {name: arrays[name].view(shape) for name, (_, shape) in self._parts.items() if len(shape) > 1}
        return arrays | {name: arrays[name].view(torch.float32) for name in self._floats}


class Staging:
    """Host buffers for the inputs and results of one step at a time, and when the device started and finished it."""

    def __init__(self, num_inputs: int, num_results: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.inputs = torch.zeros(num_inputs, dtype=torch.int32, pin_memory=pinned)
        self.results = torch.zeros(num_results, dtype=torch.int32, pin_memory=pinned)
        self._array = self.inputs.numpy()
        self.started, self.finished = _device_event(device), _device_event(device)
        self._used = False
        self._views: dict[Sections, dict[str, np.ndarray]] = {}

    def wait(self) -> None:
        """Wait until the device has finished the step that used these buffers before."""
        if self._used:
            self.finished.synchronize()
        self._used = True

    def views(self, sections: Sections) -> dict[str, np.ndarray]:
        """The arrays of a step in the buffer of inputs."""
        if sections not in self._views:
            if len(self._views) > 256:
                self._views.clear()
            self._views[sections] = sections.on_host(self._array)
        return self._views[sections]


class _HostClock:
    """Stands for a CUDA event on a CPU, which computes synchronously."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _HostClock) -> float:
        return (later._time - self._time) * 1e3


def _device_event(device: torch.device) -> Any:
    """An event that records when the device gets to it."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostClock()
