"""Who holds state slots: running requests, and the cached blocks that snapshots belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from chairlift.core.plan import NO_SLOT


class Snapshots(dict[int, int]):
    """Maps indexed blocks to the slots that hold the state at their end."""

    def __init__(self) -> None:
        super().__init__()
        self._block_of: dict[int, int] = {}
        self._reused: set[int] = set()  # blocks whose snapshot a request has continued from

    def was_reused(self, block: int) -> bool:
        return block in self._reused

    def reuse(self, block: int) -> int:
        """The slot of a snapshot that a request continues from."""
        self._reused.add(block)
        return self[block]

    def add(self, block: int, slot: int) -> None:
        assert block not in self
        assert slot not in self._block_of
        self[block] = slot
        self._block_of[slot] = block

    def remove_blocks(self, blocks: Iterable[int]) -> list[int]:
        """Remove the snapshots of these blocks, where they have one; return their slots."""
        slots = [self.pop(block) for block in blocks if block in self]
        for slot in slots:
            self._reused.discard(self._block_of.pop(slot))
        return slots

    def remove_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            block = self._block_of.pop(slot)
            del self[block]
            self._reused.discard(block)


@dataclass(slots=True)
class ForkState:
    """The state before the last token of a prompt, from which the other completions (n > 1) continue."""

    num_tokens: int
    slot: int
    forks_left: int


@dataclass(slots=True)
class RequestStates:
    """The slots that a request holds, with one reference each."""

    current: int = NO_SLOT  # the state after its planned tokens; NO_SLOT before the first one
    target: int = NO_SLOT  # reserved for the state after the step being planned; may be `current`
    drafts: list[int] = field(default_factory=list)  # reserved for the states after draft tokens
    drafted_from: int | None = None  # The number of tokens before the chunk of drafts in flight.
    fork: ForkState | None = None
    forked_from: str | None = None  # until its first chunk is planned: the request that keeps the state it starts with
    pending: dict[int, int] = field(default_factory=dict)  # number of tokens -> slot of a snapshot not yet indexed
    wanted: dict[int, bytes] = field(default_factory=dict)  # number of tokens -> digest, where to take a snapshot
    newest: int | None = None  # tokens before the last snapshot of its output, which the next one replaces

    def held(self) -> Iterator[int]:
        """The slots, each as often as it is referenced."""
        if self.current != NO_SLOT:
            yield self.current
        if self.target not in (NO_SLOT, self.current):
            yield self.target
        yield from self.drafts
        if self.fork is not None and self.fork.slot != NO_SLOT:
            yield self.fork.slot
        yield from self.pending.values()
