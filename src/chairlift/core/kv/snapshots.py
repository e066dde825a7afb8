"""Snapshots of recurrent states: which state slot belongs to which cached block."""

from __future__ import annotations

from collections.abc import Iterable


class Snapshots:
    """Maps indexed blocks to the slots that hold the state at their end."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._reused: set[int] = set()  # blocks whose snapshot a request has continued from

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, block: int) -> bool:
        return block in self._slot_of

    def items(self) -> list[tuple[int, int]]:
        """(block, slot) of every snapshot."""
        return list(self._slot_of.items())

    def slot_of(self, block: int) -> int:
        return self._slot_of[block]

    def was_reused(self, block: int) -> bool:
        return block in self._reused

    def reuse(self, block: int) -> int:
        """The slot of a snapshot that a request continues from."""
        self._reused.add(block)
        return self._slot_of[block]

    def add(self, block: int, slot: int) -> None:
        assert block not in self._slot_of
        assert slot not in self._block_of
        self._slot_of[block] = slot
        self._block_of[slot] = block

    def remove_blocks(self, blocks: Iterable[int]) -> list[int]:
        """Remove the snapshots of these blocks, where they have one; return their slots."""
        slots = [self._slot_of.pop(block) for block in blocks if block in self._slot_of]
        for slot in slots:
            self._reused.discard(self._block_of.pop(slot))
        return slots

    def remove_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            block = self._block_of.pop(slot)
            del self._slot_of[block]
            self._reused.discard(block)
