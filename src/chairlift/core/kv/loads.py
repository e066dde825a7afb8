"""Loads: parts that are on their way from tiers to blocks of the device, for a request that waits for them.

A load holds its blocks until the mover has reported its end. Then they are indexed like blocks that were computed, and
the request finds them as any other cached prefix. It loads once per admission: if the blocks are evicted before it is
admitted, or loading takes far too long, it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.prefix_index import PrefixIndex, PrefixMatch
from chairlift.core.kv.state_slots import StateSlots
from chairlift.core.kv.tiers import KEYS_AND_VALUES, STATE, LoadEnded, PartKey, PartMove, Tier, Tiers
from chairlift.core.plan import NO_SLOT
from chairlift.core.request import Request

PATIENCE, LEAST_PATIENCE = 8.0, 1.0  # A load may take so many times its predicted seconds, and at least so many.

ComputeSeconds = Callable[[int, int], float]
"""(number of tokens, position of the first one) -> predicted seconds to compute them."""


def always_load(num_tokens: int, start: int) -> float:
    """A prediction for machines that have not computed anything yet."""
    return float("inf")


class _Run(NamedTuple):
    """Parts that could be loaded for a request: the blocks from `first` to `end`, and perhaps the state there."""

    first: int
    end: int
    sources: Sequence[tuple[Tier, PartKey]]
    state: tuple[Tier, PartKey] | None


@dataclass(slots=True)
class _Load:
    id: int
    request: Request
    held: list[int]  # cached blocks before the first loaded one
    first: int
    blocks: list[int]
    keys: list[PartKey]  # those of the blocks
    state_slot: int
    state_key: PartKey | None
    num_bytes: Counter[str]  # The keys are tiers.
    due: float
    overdue: bool = False


class DeviceCache(Protocol):
    """The part of the KV accounting that blocks are loaded into."""

    @property
    def block_size(self) -> int: ...
    @property
    def index(self) -> PrefixIndex: ...
    @property
    def pool(self) -> BlockPool: ...
    @property
    def states(self) -> StateSlots | None: ...
    def need(self, request: Request) -> int: ...


class Loads:
    """The loads in flight, and the choice between loading and computing."""

    def __init__(self, kv: DeviceCache, tiers: Tiers, compute_seconds: ComputeSeconds = always_load) -> None:
        self._kv = kv
        self._tiers = tiers
        self._compute_seconds = compute_seconds
        self._loads: dict[int, _Load] = {}
        self._of_request: dict[str, _Load] = {}
        self._num_started = 0
        self.num_skipped = 0  # loads not made because computing was predicted to be faster

    def __len__(self) -> int:
        return len(self._loads)

    def is_loading(self, request: Request) -> bool:
        """Whether `request` waits for a load that is in time."""
        load = self._of_request.get(request.id)
        return load is not None and load.request is request and not load.overdue

    @property
    def will_release(self) -> bool:
        """Whether loads that are in time hold blocks."""
        return any(not load.overdue for load in self._loads.values())

    def held_blocks(self) -> list[int]:
        """The blocks that loads hold, each as often as it is held."""
        return [block for load in self._loads.values() for block in (*load.held, *load.blocks)]

    def held_slots(self) -> list[int]:
        """The state slots that loads hold."""
        return [load.state_slot for load in self._loads.values() if load.state_slot != NO_SLOT]

    def begin_step(self, now: float) -> None:
        """End the loads that the mover has reported, and stop to wait for those that are overdue."""
        self._tiers.now = now
        for loaded in self._tiers.read_reports():
            load = self._loads.pop(loaded.load_id)
            self._tiers.learn(load.num_bytes, loaded.seconds or {})
            self._end(load, loaded)
        self._tiers.flush()
        for load in self._loads.values():
            if now > load.due and not load.overdue:
                load.overdue = True
                self._kv.index.drop_claims(load.request)

    # ---- starting -----------------------------------------------------------------------------------------------

    def start(self, request: Request, match: PrefixMatch, spare_blocks: int, spare_slots: int) -> bool:
        """Start to load what `request` needs beyond `match`, if that is faster than computing it and there is room for
        all of the request in the memory that running requests spare; return whether a load was started."""
        if request.load_generation == request.generation or match.in_progress or request.group is not None:
            return False
        if request.needs_whole_prompt or any(load.overdue for load in self._loads.values()):
            return False  # A tier that does not answer is not asked for more.
        run = self._find(request, match)
        if run is None or spare_blocks < self._kv.need(request) or spare_slots < 2:
            return False
        kept = len(match.blocks)
        loading = self._seconds_in_flight() + self._seconds(run)
        size = self._kv.block_size
        if loading >= self._compute_seconds((run.end - kept) * size, kept * size):
            self.num_skipped += 1
            for tier in {id(tier): tier for tier, _ in run.sources}.values():
                tier.hope()
            request.load_generation = request.generation
            return False
        self._begin(request, run, loading)
        return True

    def _find(self, request: Request, match: PrefixMatch) -> _Run | None:
        """The best run of parts in the tiers; None if there is none."""
        index, states = self._kv.index, self._kv.states
        first = len(match.blocks) + match.num_without_state
        shareable = (request.num_known - 1) // self._kv.block_size
        digests = index.digests(request, shareable)
        sources = list[tuple[Tier, PartKey]]()
        for digest in digests[first:shareable]:
            key = PartKey(digest, KEYS_AND_VALUES)
            tier = self._tiers.find(key)
            if tier is None:
                break
            sources.append((tier, key))
        if states is not None:
            return self._with_state(request, _Run(first, first + len(sources), sources, None), len(match.blocks))
        end = self._best_end(sources, first)
        return _Run(first, first + end, sources[:end], None) if end else None

    def _with_state(self, request: Request, run: _Run, kept: int) -> _Run | None:
        """The longest part of a run that ends where a tier has the state."""
        if request.params.num_sequences > 1:
            return None
        digests = request.block_digests
        for end in range(run.end, kept, -1):
            key = PartKey(digests[end - 1], STATE)
            tier = self._tiers.find(key)
            if tier is not None:
                return _Run(min(run.first, end), end, run.sources[: max(0, end - run.first)], (tier, key))
        return None

    def _best_end(self, sources: Sequence[tuple[Tier, PartKey]], first: int) -> int:
        """How many of these blocks to load so that loading them and computing the others takes the least time.

        What computing takes grows with the position, so the best place is where the tier changes, or the end.
        """
        size, num_bytes = self._kv.block_size, self._tiers.part_bytes[KEYS_AND_VALUES]
        best, most_saved, seconds = 0, 0.0, 0.0
        for count, (tier, _) in enumerate(sources, 1):
            seconds += tier.seconds(num_bytes)
            if count == len(sources) or sources[count][0] is not tier:
                saved = self._compute_seconds(count * size, first * size) - seconds
                if saved > most_saved:
                    best, most_saved = count, saved
        return best or len(sources)  # The caller compares the whole of it with computing.

    def _seconds(self, run: _Run) -> float:
        parts = run.sources if run.state is None else [*run.sources, run.state]
        return sum(tier.seconds(self._tiers.part_bytes[key.part]) for tier, key in parts)

    def _seconds_in_flight(self) -> float:
        tiers = {tier.name: tier for tier in self._tiers.tiers}
        in_flight = sum((load.num_bytes for load in self._loads.values()), Counter[str]())
        return sum(tiers[name].seconds(num_bytes) for name, num_bytes in in_flight.items())

    def _begin(self, request: Request, run: _Run, seconds: float) -> None:
        kv, states = self._kv, self._kv.states
        held = list(kv.index.find(request).blocks[: run.first])
        kv.pool.share(held)
        blocks = kv.pool.take(run.end - run.first)
        assert blocks is not None, "there is room for the whole request"
        slot = NO_SLOT
        if run.state is not None:
            assert states is not None
            taken = states.slots.take(1)
            assert taken is not None, "there is a spare slot"
            slot = taken[0]
        kv.index.claim_positions(request, run.first, run.end)
        moves = [(tier.name, PartMove(key, block)) for (tier, key), block in zip(run.sources, blocks, strict=True)]
        if run.state is not None:
            moves.append((run.state[0].name, PartMove(run.state[1], slot)))
        num_bytes = Counter[str]()
        for name, move in moves:
            num_bytes[name] += self._tiers.part_bytes[move.key.part]
        self._num_started += 1
        load = _Load(
            id=self._num_started,
            request=request,
            held=held,
            first=run.first,
            blocks=blocks,
            keys=[key for _, key in run.sources],
            state_slot=slot,
            state_key=run.state[1] if run.state else None,
            num_bytes=num_bytes,
            due=self._tiers.now + max(LEAST_PATIENCE, PATIENCE * seconds),
        )
        self._loads[load.id] = self._of_request[request.id] = load
        request.load_generation = request.generation
        self._tiers.mover.load(load.id, moves)

    # ---- ending -------------------------------------------------------------------------------------------------

    def _end(self, load: _Load, loaded: LoadEnded) -> None:
        """Index what was loaded intact, and release what the load holds."""
        kv, request = self._kv, load.request
        intact = next((n for n, key in enumerate(load.keys) if key in loaded.failed), len(load.keys))
        if not load.overdue and request.ending is None:  # Another request may have the id of one that has ended.
            kv.index.drop_claims(request)
        inserted = kv.index.insert(request, load.first, load.blocks[:intact])
        kv.pool.mark_cached(inserted)
        for block in inserted:  # Faster tiers may lack what a slower one had.
            self._tiers.keep(PartKey(kv.index.digest_of(block), KEYS_AND_VALUES), block)
        if load.state_slot != NO_SLOT:
            assert kv.states is not None
            whole = intact == len(load.keys) and load.state_key not in loaded.failed
            kv.states.adopt(request, load.first + len(load.blocks), load.state_slot, index=whole)
        kv.pool.release(reversed([*load.held, *load.blocks]))
        if self._of_request.get(request.id) is load:
            del self._of_request[request.id]
