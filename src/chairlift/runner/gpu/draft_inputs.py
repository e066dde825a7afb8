"""The inputs of a draft network's passes, in one buffer that a single copy takes to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import sent
from chairlift.runner.gpu.recent_states import RecentStates
from chairlift.runner.gpu.shapes import MIN_UPDATES
from chairlift.speculation.control.proposer import A_FEW
from chairlift.speculation.draft_network import DraftNetwork
from chairlift.speculation.draft_proposer import DraftTask


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
    def sections(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """The part of the input buffer that each array takes, and its shape."""
        return _sections(self)

    @property
    def size(self) -> int:
        return int(next(reversed(self.sections.values()))[0].stop)

    def device_views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {name: buffer[section].view(shape) for name, (section, shape) in self.sections.items()}


@lru_cache(maxsize=64)
def _sections(shape: DraftShape) -> dict[str, tuple[slice, tuple[int, ...]]]:
    updates = max(MIN_UPDATES, 2 * shape.requests)
    later = (shape.places - 1, shape.padded_requests)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("token", "slot", "position", "start", "count", "state_row"), (shape.rows,)
    )
    shapes |= dict.fromkeys(("last_row", "next_slot"), (shape.requests,))
    shapes |= dict.fromkeys(("next_position", "next_start", "next_count"), later)
    shapes |= dict.fromkeys(("update_cell", "update_block"), (updates,))
    found, at = {}, 0
    for name, sizes in shapes.items():
        size = int(np.prod(sizes))
        found[name] = slice(at, at + size), sizes
        at += -(-size // 4) * 4  # aligned, too
    return found


class DraftInputs:
    """Packs the requests of a draft; one draft is read before the next one is packed."""

    def __init__(
        self,
        network: DraftNetwork,
        slots: Slots,
        tables: Tensor,
        largest: DraftShape,
        recent: RecentStates | None,
    ) -> None:
        """`slots`, `tables`: those of the runner. `recent`: the states that the network reads, if any."""
        self._network, self._slots, self._tables, self._recent = network, slots, tables, recent
        device = tables.device
        self.buffer = torch.zeros(largest.size, dtype=torch.int32, device=device)
        self._staged = torch.zeros(largest.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._array = self._staged.numpy()
        self._views: dict[DraftShape, dict[str, np.ndarray]] = {}
        self._padding: dict[DraftShape, np.ndarray] = {}

    def send(self, tasks: Sequence[DraftTask], shape: DraftShape) -> None:
        """Write the requests into the buffer on the device: the tokens that the network has not computed, and where
        draft tokens go."""
        self._array[: shape.size] = self._padding_of(shape)
        views = self._views_of(shape)
        self._place_known(tasks, views)
        self._place_next(tasks, views)
        self.buffer[: shape.size].copy_(self._staged[: shape.size], non_blocking=True)

    def send_padding(self, shape: DraftShape) -> None:
        self.buffer[: shape.size].copy_(torch.from_numpy(self._padding_of(shape)))

    def _padding_of(self, shape: DraftShape) -> np.ndarray:
        """Rows that belong to no request, which write nothing to the cache."""
        if shape not in self._padding:
            padding = np.zeros(shape.size, np.int32)
            for name in ("position", "next_position"):
                padding[shape.sections[name][0]] = -1
            padding[shape.sections["update_cell"][0]] = self._slots.padding_cell
            self._padding[shape] = padding
        return self._padding[shape]

    def _views_of(self, shape: DraftShape) -> dict[str, np.ndarray]:
        if shape not in self._views:
            sections = shape.sections.items()
            self._views[shape] = {name: self._array[section].reshape(sizes) for name, (section, sizes) in sections}
        return self._views[shape]

    def _place_known(self, tasks: Sequence[DraftTask], views: dict[str, np.ndarray]) -> None:
        cells: list[int] = []
        blocks: list[int] = []
        tokens: list[int] = []
        states: list[int] = []
        slots: list[int] = []
        firsts: list[int] = []
        for task in tasks:
            request = task.request
            slot = self._slots.of(request)
            self._slots.draft_changes(slot, request, task.table, cells, blocks)
            first, end = self._network.first_position(request), request.num_known
            slots.append(slot.index)
            firsts.append(first)
            tokens += request.tokens[first:end]
            if self._recent is not None:
                states += self._recent.rows(request, first, end)
                self._recent.drafted(request)
        counts = np.array([task.request.num_known for task in tasks]) - np.array(firsts)
        owner = np.repeat(np.arange(len(tasks)), counts)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each row in its request
        rows = A_FEW * owner + offsets
        views["token"][rows] = tokens
        views["slot"][rows] = np.array(slots)[owner]
        views["position"][rows] = views["start"][rows] = np.array(firsts)[owner] + offsets
        views["count"][rows] = 1
        if states:
            views["state_row"][rows] = states
        views["last_row"][: len(tasks)] = A_FEW * np.arange(len(tasks)) + counts - 1
        views["next_slot"][: len(tasks)] = slots
        if len(cells) > len(views["update_cell"]):  # a long table at once is sent by itself
            where, what = sent([cells, blocks], self._tables.device, torch.int32)
            self._tables.view(-1)[where] = what
        elif cells:
            views["update_cell"][: len(cells)], views["update_block"][: len(cells)] = cells, blocks

    def _place_next(self, tasks: Sequence[DraftTask], views: dict[str, np.ndarray]) -> None:
        """Write where the draft tokens of each request are computed; its last one is not."""
        places = np.arange(len(views["next_count"]))[:, None]
        wanted = places + 1 < np.array([task.length for task in tasks])
        positions = np.array([task.request.num_known for task in tasks]) + places
        views["next_position"][:, : len(tasks)] = np.where(wanted, positions, -1)
        views["next_start"][:, : len(tasks)] = np.where(wanted, positions, 0)
        views["next_count"][:, : len(tasks)] = wanted
