"""The plan of a step while it is being built."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import BlockCopy, BlockSwap, Chunk
from chairlift.core.request import Request
from chairlift.core.step_limits import StepLimits


class PlanBuilder:
    """The chunks chosen so far for the coming step, and what is left of its budget."""

    def __init__(self, limits: StepLimits) -> None:
        self.chunks: dict[str, Chunk] = {}
        self.room = limits.tokens
        self.prefill_room = min(limits.prefill_tokens, self.room)
        self.slots = limits.slots
        self.memory_was_short = False
        self.reads = False  # whether a chunk that was added reads prompt positions
        self.swap_outs: list[BlockSwap] = []
        self.swap_ins: list[BlockSwap] = []
        self._limited_tenants: Collection[str] = ()
        self._limited_room = 0

    def limit_tenants(self, tenants: Collection[str], prefill_tokens: int) -> None:
        """Limit the prompts of these tenants to `prefill_tokens` in total."""
        self._limited_tenants, self._limited_room = tenants, prefill_tokens

    def room_for(self, request: Request) -> int:
        """The number of additional tokens that `request` may compute in this step."""
        room = self.room if request.decoding else self.prefill_room
        if request.tenant in self._limited_tenants and not request.decoding:
            room = min(room, self._limited_room)
        return min(self.num_behind(request), room)

    def num_behind(self, request: Request) -> int:
        """Known tokens of `request` that will not be computed after this step."""
        return request.num_behind - self.count(request)

    def count(self, request: Request) -> int:
        chunk = self.chunks.get(request.id)
        return chunk.count if chunk is not None else 0

    def add(self, request: Request, count: int, kv: KVCache, copies: tuple[BlockCopy, ...]) -> None:
        """Add `count` tokens of `request`, after any that the plan already has."""
        self._spend(request, count)
        before = self.chunks.get(request.id)
        if before is not None:
            count, copies = before.count + count, before.copies + copies
        start = request.num_planned
        samples = start + count == request.num_expected and not request.prompt_only
        read = request.positions_to_read(start, start + count)
        self.reads = self.reads or bool(read)
        table, generation = kv.table(request), request.generation
        self.chunks[request.id] = Chunk(request, start, count, table, samples, copies, generation, read=read)

    def add_decode(self, request: Request, table: Sequence[int], copies: tuple[BlockCopy, ...]) -> None:
        """Add the next token of a decoding `request`; a fast path of `add`, since most chunks are decodes."""
        self.room -= 1
        self.prefill_room = min(self.prefill_room, self.room)
        self.chunks[request.id] = Chunk(request, request.num_planned, 1, table, True, copies, request.generation)

    def add_drafts(self, request: Request, drafts: Sequence[int]) -> None:
        """Add draft tokens to the chunk of `request`."""
        chunk = self.chunks[request.id]
        self._spend(request, len(drafts))
        chunk.count += len(drafts)  # nothing refers to the chunk before the plan is sealed
        chunk.drafts = tuple(drafts)

    def drop(self, request: Request) -> Chunk | None:
        """Remove the chunk of `request`, if any, and return its tokens to the budget."""
        chunk = self.chunks.pop(request.id, None)
        if chunk is not None:
            self._spend(request, -chunk.count)
        return chunk

    def _spend(self, request: Request, count: int) -> None:
        self.room -= count
        if not request.decoding:
            self.prefill_room -= count
            if request.tenant in self._limited_tenants:
                self._limited_room -= count
        self.prefill_room = min(self.prefill_room, self.room)
