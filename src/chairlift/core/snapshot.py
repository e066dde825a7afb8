"""Snapshots of a scheduler for observers such as the dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.core.kv.state_slots import StateUsage
from chairlift.core.plan import StepLimits
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.waiting_queue import WaitReason


class BlockState(NamedTuple):
    block: int
    references: int
    cached: bool


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """The state of a scheduler after a step. The tables are views that are valid until the next step."""

    policy: str
    waiting: Sequence[tuple[str, WaitReason]]  # the front of the queue
    wait_reasons: Mapping[WaitReason, int]  # Counts over the whole queue.
    evictions: int  # It counts since the start.
    tables: Mapping[str, Sequence[int]]  # the blocks of each observed request, in the order of its tables
    rewritten: Set[str]  # observed requests whose table changed other than by growing since the last snapshot
    blocks: Sequence[BlockState]  # blocks that may have changed since the last snapshot
    states: StateUsage | None  # The slots of recurrent layers, if there are any.


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """The initial state for an observer: the sizes of a scheduler, its requests and its blocks in use."""

    max_batch_requests: int
    num_blocks: int
    block_size: int
    prefix_caching: bool
    ordering: str
    limits: StepLimits | None  # The limits of the last step.
    requests: Sequence[Request]  # open ones, and finished ones that still hold a slot
    blocks: Sequence[BlockState]


@dataclass(frozen=True, slots=True)
class SchedulerObserver:
    """Takes snapshots of a scheduler. Changes are tracked only between `start` and `stop`, because that costs time."""

    scheduler: Scheduler
    max_waiting: int  # waiting requests in a snapshot

    def start(self) -> SchedulerSetup:
        """Begin to track changes and return the whole state; may be called again."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        kv.track_changes(True)
        blocks = (self._block_state(block) for block in range(kv.num_blocks))
        return SchedulerSetup(
            max_batch_requests=scheduler.max_batch_requests,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            prefix_caching=kv.prefix_caching,
            ordering=scheduler.ordering.name,
            limits=scheduler.limits,
            requests=[*scheduler.running, *scheduler.waiting, *scheduler.idle],
            blocks=[state for state in blocks if state.references or state.cached],
        )

    def snapshot(self, requests: Iterable[Request]) -> SchedulerSnapshot:
        """The current state, with the tables of `requests`."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        changes, waiting = kv.take_changes(), scheduler.waiting
        return SchedulerSnapshot(
            policy=scheduler.policy.name,
            waiting=[(request.id, waiting.last_reason(request)) for request in waiting[: self.max_waiting]],
            wait_reasons=waiting.reasons(),
            evictions=kv.pool.num_evictions,
            tables={request.id: kv.held(request) for request in requests},
            rewritten=changes.rewritten,
            blocks=[self._block_state(block) for block in changes.blocks],
            states=None if kv.states is None else kv.states.usage,
        )

    def stop(self) -> None:
        self.scheduler.kv.track_changes(False)

    def find(self, request_id: str) -> Request | None:
        """A request that is open or still holds blocks."""
        return self.scheduler.get(request_id)

    @property
    def keeps_slots(self) -> bool:
        """Whether finished requests keep their slots until their batch ends."""
        return self.scheduler.policy.keeps_slots

    def _block_state(self, block: int) -> BlockState:
        pool = self.scheduler.kv.pool
        return BlockState(block, pool.references(block), pool.is_cached(block))
