"""The engine's scheduler, for a simulation that keeps most decoding requests outside of it (`steady_decodes.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.state import SchedulerState
from chairlift_lab.simulator.kv_cache import SimulatedKVCache


class SimulatedState(SchedulerState):
    """Scheduler state with `num_aside` more running requests, which decode in every step."""

    num_aside = 0

    def slots_with(self, running: Sequence[Request]) -> int:
        return super().slots_with(running) + self.num_aside

    def blocks_promised(self) -> int:
        return super().blocks_promised() + self.num_aside

    @property
    def batch_is_over(self) -> bool:
        return super().batch_is_over and not self.num_aside


class SimulatedScheduler(Scheduler):
    """A scheduler whose steps also have the tokens of requests that are kept aside."""

    state_type = SimulatedState
    kv: SimulatedKVCache
    state: SimulatedState

    def _begin_plan(self, now: float) -> PlanBuilder:
        """The plan of a step that also has one token of each request that is kept aside."""
        builder = super()._begin_plan(now)
        builder.room -= self.state.num_aside
        builder.prefill_room = min(builder.prefill_room, builder.room)
        return builder
