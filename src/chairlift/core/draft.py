"""A step's plan while it is being made."""

from __future__ import annotations

from chairlift.core.budget import StepLimits
from chairlift.core.kv_cache import KVCache
from chairlift.core.plan import BlockCopy, Chunk
from chairlift.core.request import Request


class PlanDraft:
    """The chunks chosen so far for the coming step, and what is left of its budget."""

    def __init__(self, limits: StepLimits) -> None:
        self.chunks: dict[str, Chunk] = {}
        self.room = limits.tokens
        self.prefill_room = min(limits.prefill_tokens, limits.tokens)
        self.seats = limits.seats
        self.memory_was_short = False
        self.promised_blocks = 0  # what the requests on board will still take, counted when boarding begins

    def room_for(self, request: Request) -> int:
        """How many of its missing tokens `request` may compute in this step."""
        room = self.room if request.decoding else self.prefill_room
        return min(request.num_behind, room)

    def add(self, request: Request, count: int, kv: KVCache, copies: tuple[BlockCopy, ...]) -> None:
        self._spend(request, count)
        start = request.num_planned
        samples = start + count == request.num_expected
        self.chunks[request.id] = Chunk(request, start, count, kv.table(request), samples, copies, request.generation)

    def drop(self, request: Request) -> None:
        """Take a preempted request out again, if it was in, and give its tokens back to the budget."""
        self.memory_was_short = True
        chunk = self.chunks.pop(request.id, None)
        if chunk is not None:
            self._spend(request, -chunk.count)

    def _spend(self, request: Request, count: int) -> None:
        self.room -= count
        if not request.decoding:
            self.prefill_room -= count
        self.prefill_room = min(self.prefill_room, self.room)
