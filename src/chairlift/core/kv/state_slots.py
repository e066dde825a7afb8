"""The states of recurrent layers: slots beside KV blocks.

A slot holds the state of one sequence after some number of tokens. A running request owns one, which a step overwrites
with the state after its chunk. *Snapshots* are slots that are kept at block boundaries, each attached to the indexed
block that ends there, so a prefix hit is the longest run of cached blocks with a snapshot at its end:

    tokens      0 ........ 15 | 16 ....... 31 | 32 ....... 47 | 48 .. 52
    blocks           7        |       2       |       9       |   4
    snapshots                               slot 3            .           the next request with these tokens continues
                                                                          from slot 3 after 32 of them

Snapshots are taken where they pay: at the last boundary of a prompt, where a waiting request diverges from the one that
is computing their common prefix, where a request found cached blocks without a state, at the newest boundary of an
output (which replaces the one before), and, as long as most slots are empty, at regular intervals.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.core.kv.block_pool import BlockPool, Resource
from chairlift.core.kv.prefix_index import Miss, PrefixIndex, PrefixMatch
from chairlift.core.kv.snapshots import ForkState, RequestStates, Snapshots
from chairlift.core.kv.tiers import STATE, PartKey, Tiers
from chairlift.core.plan import NO_SLOT, BlockCopy, Chunk, ChunkStates
from chairlift.core.request import Request

MIN_SLOTS = 2  # one to read a snapshot from, one to write to
SLOTS_PER_BEAM = 2  # beams that share a state need another slot each before they give it up; a search needs one more
MAX_DIVERGENCES = 1024  # remembered boundaries at which waiting requests diverge from running ones


class StateUsage(NamedTuple):
    """How many state slots requests hold, hold snapshots, and exist."""

    used: int
    snapshots: int
    total: int


class StateSlots(Resource):
    """The state slots of all requests, and the snapshots that the prefix cache keeps."""

    def __init__(
        self, num_slots: int, index: PrefixIndex, *, prefix_caching: bool = True, snapshot_interval: int | None = None
    ) -> None:
        """`index`: that of the blocks. `snapshot_interval`: tokens between snapshots taken while most slots are empty;
        None: no such ones."""
        assert num_slots >= MIN_SLOTS
        self.index = index
        self.block_size = block_size = index.block_size
        self.prefix_caching = prefix_caching
        self.snapshots = Snapshots()
        self.slots = BlockPool(num_slots, on_evict=self.snapshots.remove_slots)
        self.interval = None if snapshot_interval is None else max(1, snapshot_interval // block_size) * block_size
        self.tiers: Tiers | None = None
        self._states: dict[str, RequestStates] = {}
        self._divergences: OrderedDict[bytes, None] = OrderedDict()  # digests of blocks that end where a snapshot pays
        self._expected: dict[bytes, str] = {}  # digest of a block -> the running request that will take a snapshot

    def by_request(self) -> dict[str, RequestStates]:
        return dict(self._states)

    def expected_snapshots(self) -> dict[bytes, str]:
        """The running request that will take each snapshot that others wait for, by the digest of the block."""
        return dict(self._expected)

    def evicted(self, blocks: Sequence[int]) -> None:
        """Drop the snapshots of cached blocks that are evicted."""
        self.slots.uncache(self.snapshots.remove_blocks(blocks))

    # ---- memory -------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> StateUsage:
        return StateUsage(self.slots.num_used, len(self.snapshots), self.slots.num_blocks)

    @property
    def max_beams(self) -> int:
        """The beams of one search that there are slots for."""
        return (self.slots.num_blocks - 1) // SLOTS_PER_BEAM

    @property
    def draft_room(self) -> int:
        """Draft tokens of a step that there are slots for."""
        reserved = (len(states.drafts) for states in self._states.values() if states.drafted_from is None)
        return self.slots.num_free + sum(reserved)

    @property
    def num_free(self) -> int:
        return self.slots.num_free

    def need(self, request: Request) -> int:
        if request.group is None:
            return 1
        return 1 + SLOTS_PER_BEAM * request.num_slots - len(set(self._states[request.id].held()))

    def to_come(self, request: Request) -> int:
        return 0 if request.group is None else SLOTS_PER_BEAM * request.num_slots - 1

    def num_own(self, requests: Sequence[Request]) -> int:
        own = (self._states.get(request.id) for request in requests)
        held = Counter(slot for states in own if states is not None for slot in states.held())
        return sum(self.slots.references(slot) == count for slot, count in held.items())

    # ---- prefix hits --------------------------------------------------------------------------------------------

    def shorten(self, request: Request, match: PrefixMatch) -> PrefixMatch:
        """The longest run of the cached blocks with a state at its end."""
        blocks = match.blocks
        if match.in_progress:
            self._note_divergence(request, len(blocks))
        fork = self._fork_position(request)
        kept = len(blocks) if fork is None else min(len(blocks), fork // self.block_size)
        while kept and blocks[kept - 1] not in self.snapshots:
            kept -= 1
        if kept == len(blocks):
            return match
        expected = any(self.index.digest(request, position) in self._expected for position in range(kept, len(blocks)))
        return PrefixMatch(blocks[:kept], Miss.NO_STATE, match.in_progress or expected, len(blocks) - kept)

    def _note_divergence(self, request: Request, num_found: int) -> None:
        """Ask for a snapshot where a waiting `request` diverges from those that compute its prefix."""
        index, position, shareable = self.index, num_found, (request.num_known - 1) // self.block_size
        while position < shareable and index.is_expected(index.digest(request, position)):
            position += 1
        self._divergences[index.digest(request, position - 1)] = None
        if len(self._divergences) > MAX_DIVERGENCES:
            self._divergences.popitem(last=False)

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Start `request` with the state at the end of `match`."""
        states = self._states[request.id] = RequestStates()
        if match.blocks:
            states.current = self.snapshots.reuse(match.blocks[-1])
            self.slots.share([states.current])
        if self.prefix_caching:
            self._expect_snapshots(request, states, match)
        fork = self._fork_position(request)
        if fork is not None:
            states.fork = ForkState(fork, NO_SLOT, request.params.num_sequences - 1)

    def _fork_position(self, request: Request) -> int | None:
        """The number of tokens after which a request keeps its state for others: of `n` completions before the last
        token of the prompt, of beams that join again after a preemption the whole blocks of the prompt."""
        if request.group is not None:
            return request.num_prompt // self.block_size * self.block_size if request.num_output else None
        return request.num_prompt - 1 if request.params.num_sequences > 1 and not request.num_output else None

    def adopt(self, request: Request, num_blocks: int, slot: int, *, index: bool) -> None:
        """Release a slot that a state was loaded into; with `index`, as the snapshot after so many blocks of
        `request`, if it still lacks one."""
        block = self._indexed_block(request, num_blocks * self.block_size) if index else None
        if block is not None and block not in self.snapshots:
            self.slots.mark_cached([slot])
            self.snapshots.add(block, slot)
        self.slots.release([slot])

    def _expect_snapshots(self, request: Request, states: RequestStates, match: PrefixMatch) -> None:
        """Decide where `request` takes snapshots: at the last boundaries of its prompt and of its known tokens, and
        where its tokens begin to differ from cached ones."""
        ends = {(request.num_prompt - 1) // self.block_size, (request.num_known - 1) // self.block_size}
        ends.add(len(match.blocks) + match.num_without_state)
        for num_blocks in ends:
            if num_blocks > len(match.blocks):
                digest = self.index.digest(request, num_blocks - 1)
                states.wanted[num_blocks * self.block_size] = digest
                self._expected.setdefault(digest, request.id)

    def fork_point(self, parent: Request, num_tokens: int) -> int:
        """The longest prefix of at most `num_tokens` tokens whose state is kept."""
        return self._state_at(parent, num_tokens)[0]

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Start `child` with the state of `parent` after `num_tokens` tokens, a fork point."""
        slot = self._state_at(parent, num_tokens)[1]
        self._states[child.id] = RequestStates(current=slot)
        if slot != NO_SLOT:
            self.slots.share([slot])
        kept = self._states[parent.id].fork
        if kept is not None and kept.num_tokens == num_tokens:
            self._states[child.id].forked_from = parent.id

    def _state_at(self, parent: Request, num_tokens: int) -> tuple[int, int]:
        """The last position up to `num_tokens` at which a state of `parent` is kept, and its slot."""
        states = self._states[parent.id]
        if num_tokens == parent.num_planned:
            return num_tokens, states.current
        kept, slot = 0, NO_SLOT
        if states.fork is not None and states.fork.slot != NO_SLOT and states.fork.num_tokens <= num_tokens:
            kept, slot = states.fork.num_tokens, states.fork.slot
        for boundary in range(num_tokens // self.block_size * self.block_size, kept, -self.block_size):
            block = self._block_with_snapshot(parent, boundary)
            if block is not None:
                return boundary, self.snapshots.reuse(block)
        return kept, slot

    # ---- planning a step ----------------------------------------------------------------------------------------

    def reserve(self, request: Request, count: int) -> tuple[BlockCopy, ...] | None:
        states = self._states[request.id]
        if states.target == NO_SLOT:
            if states.current != NO_SLOT and self.slots.is_private(states.current):
                states.target = states.current
            elif (taken := self.slots.take(1)) is not None:
                states.target = taken[0]
            else:
                return None
        if count > 1 and request.decoding:  # All but the first token are drafts.
            taken = self.slots.take(max(0, count - 1 - len(states.drafts)))
            if taken is None:
                return None
            states.drafts += taken
        return ()

    def plan(self, chunks: Sequence[Chunk]) -> tuple[ChunkStates, ...]:
        """The slots that the chunks of a step read and write."""
        unused: list[int] = []  # released last: no chunk may write to a slot that another one reads
        plans = tuple(self._plan_chunk(chunk, self._states[chunk.request.id], unused) for chunk in chunks)
        self.slots.release(unused)
        return plans

    def _plan_chunk(self, chunk: Chunk, states: RequestStates, unused: list[int]) -> ChunkStates:
        if states.forked_from is not None:
            self._count_fork(states, unused)
        num_drafts = len(chunk.drafts)
        unused += states.drafts[num_drafts:]
        del states.drafts[num_drafts:]
        self._keep_current(chunk, states)
        read, states.current, states.target = states.current, states.target, NO_SLOT
        if read not in (NO_SLOT, states.current):
            unused.append(read)
        kept = [] if num_drafts else self._keep_within(chunk, states)
        if states.wanted:  # Most decodes want no snapshot.
            for num_tokens in [each for each in states.wanted if each < chunk.end and each not in states.pending]:
                self._stop_expecting(chunk.request, states, num_tokens)  # there was no slot for it
        if num_drafts:
            states.drafted_from = chunk.start
            return ChunkStates(read, tuple(enumerate((states.current, *states.drafts))))
        rows = ((num_tokens - chunk.start - 1, slot) for num_tokens, slot in kept)
        return ChunkStates(read, (*rows, (chunk.count - 1, states.current)))

    def _count_fork(self, states: RequestStates, unused: list[int]) -> None:
        """Let the parent give up the state that it keeps for forks, once all of them have begun.

        A fork counts when its first chunk is planned, because it is undone if the request cannot be admitted.
        """
        parent = self._states.get(states.forked_from or "")
        states.forked_from = None
        if parent is None or parent.fork is None:
            return
        parent.fork.forks_left -= 1
        if not parent.fork.forks_left:
            if parent.fork.slot != NO_SLOT:
                unused.append(parent.fork.slot)
            parent.fork = None

    def _keep_current(self, chunk: Chunk, states: RequestStates) -> None:
        """Keep the state that a chunk continues from, if it is needed later, by writing to another slot."""
        start, current, fork = chunk.start, states.current, states.fork
        if not start:
            return
        forks = fork is not None and fork.num_tokens == start and fork.slot == NO_SLOT
        is_snapshot = start % self.block_size == 0 and self.prefix_caching and not self.slots.is_cached(current)
        is_snapshot = is_snapshot and (start >= chunk.request.num_prompt or self._pays(chunk.request, states, start))
        if not (forks or is_snapshot):
            return
        if states.target == current:
            taken = self.slots.take(1)
            if taken is None:
                return
            states.target = taken[0]
        if is_snapshot and start not in states.pending:
            self.slots.share([current])
            states.pending[start] = current
        if forks:
            assert fork is not None
            self.slots.share([current])
            fork.slot = current

    def _keep_within(self, chunk: Chunk, states: RequestStates) -> list[tuple[int, int]]:
        """Take slots for states within a chunk that are needed later; return (number of tokens, slot) of each."""
        kept: dict[int, int] = {}
        fork = states.fork
        if fork is not None and chunk.start < fork.num_tokens < chunk.end and (taken := self.slots.take(1)):
            fork.slot = kept[fork.num_tokens] = taken[0]
        # Those that are wanted come first: the others must not take the last slots.
        size = self.block_size
        boundaries = range((chunk.start // size + 1) * size, chunk.end if self.prefix_caching else 0, size)
        wanted = [boundary for boundary in boundaries if self._is_wanted(chunk.request, states, boundary)]
        regular = [boundary for boundary in boundaries if self._is_regular(boundary)]
        for num_tokens in dict.fromkeys((*wanted, *regular)):
            if num_tokens not in wanted and not self._many_empty:
                break
            if self._block_with_snapshot(chunk.request, num_tokens) is not None:
                continue
            if num_tokens in kept:
                self.slots.share([kept[num_tokens]])
            elif (taken := self.slots.take(1)) is not None:
                kept[num_tokens] = taken[0]
            else:
                break
            states.pending[num_tokens] = kept[num_tokens]
        return sorted(kept.items())

    def _pays(self, request: Request, states: RequestStates, num_tokens: int) -> bool:
        """Whether to keep the state at a block boundary of a prompt."""
        regular = self._is_regular(num_tokens) and self._many_empty
        pays = regular or self._is_wanted(request, states, num_tokens)
        return pays and self._block_with_snapshot(request, num_tokens) is None

    def _is_wanted(self, request: Request, states: RequestStates, num_tokens: int) -> bool:
        if num_tokens in states.wanted:
            return True
        return (
            bool(self._divergences)
            and self.index.digest(request, num_tokens // self.block_size - 1) in self._divergences
        )

    def _is_regular(self, num_tokens: int) -> bool:
        return self.interval is not None and num_tokens % self.interval == 0

    @property
    def _many_empty(self) -> bool:
        """Whether there are slots for snapshots that may never be used."""
        return 2 * self.slots.num_empty > self.slots.num_blocks

    def _block_with_snapshot(self, request: Request, num_tokens: int) -> int | None:
        block = self._indexed_block(request, num_tokens)
        return block if block in self.snapshots else None

    # ---- applying its result ------------------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Attach the snapshots that have been computed to their blocks."""
        states = self._states[request.id]
        if states.pending:
            for num_tokens in [boundary for boundary in states.pending if boundary <= request.num_computed]:
                self._index_snapshot(request, states, num_tokens)

    def _index_snapshot(self, request: Request, states: RequestStates, num_tokens: int) -> None:
        slot = states.pending.pop(num_tokens)
        block = self._indexed_block(request, num_tokens)
        if block is not None and block not in self.snapshots:
            self.slots.mark_cached([slot])
            self.snapshots.add(block, slot)
            if self.tiers is not None:
                self.tiers.keep(PartKey(self.index.digest_of(block), STATE), slot)
            self._divergences.pop(self.index.digest(request, num_tokens // self.block_size - 1), None)
            if num_tokens >= request.num_prompt and num_tokens not in states.wanted:
                self._replace_newest(request, states, num_tokens)
        self.slots.release([slot])
        self._stop_expecting(request, states, num_tokens)

    def _replace_newest(self, request: Request, states: RequestStates, num_tokens: int) -> None:
        """Drop the last snapshot of an output for a newer one, unless other requests use it."""
        block = self._block_with_snapshot(request, states.newest) if states.newest else None
        states.newest = num_tokens
        if block is not None and not self.snapshots.was_reused(block) and self.slots.is_free(self.snapshots[block]):
            self.slots.uncache(self.snapshots.remove_blocks([block]))

    def _indexed_block(self, request: Request, num_tokens: int) -> int | None:
        """The indexed block that ends after `num_tokens` tokens of `request`."""
        return self.index.block_at(request, num_tokens // self.block_size - 1)

    def _stop_expecting(self, request: Request, states: RequestStates, num_tokens: int) -> None:
        digest = states.wanted.pop(num_tokens, None)
        if digest is not None and self._expected.get(digest) == request.id:
            del self._expected[digest]

    def trim(self, request: Request, num_tokens: int) -> None:
        """Continue from the state after the last accepted draft. Those before it may be snapshots."""
        states = self._states[request.id]
        start = states.drafted_from
        assert start is not None, "only steps with drafts compute more tokens than they keep"
        rows = {start + row: slot for row, slot in enumerate((states.current, *states.drafts), 1)}
        states.current, states.drafts, states.drafted_from = rows.pop(num_tokens), [], None
        for position, slot in rows.items():
            is_snapshot = position < num_tokens and position % self.block_size == 0 and self.prefix_caching
            if is_snapshot and position not in states.pending:
                states.pending[position] = slot
            else:
                self.slots.release([slot])

    def release(self, request: Request) -> None:
        states = self._states.pop(request.id, None)
        if states is None:
            return
        for num_tokens in list(states.wanted):
            self._stop_expecting(request, states, num_tokens)
        self.slots.release(list(states.held()))
