"""The engine's scheduler, for a simulation that keeps most decoding requests outside of it (`steady_decodes.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chairlift.core.plan_builder import PlanBuilder
from chairlift.core.policies.base import Policy
from chairlift.core.request import Request
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.state import SchedulerState
from chairlift.core.step_limits import StepLimits
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
    """A scheduler that accepts requests long after their arrival, at their original position in the queue."""

    kv: SimulatedKVCache
    state: SimulatedState

    def _make_state(self, policy: Policy, max_batch_requests: int, max_overtakes: int) -> SimulatedState:
        return SimulatedState(self.kv, policy, self.ordering, max_batch_requests, max_overtakes, self.swap)

    def take_place(self) -> int:
        """Reserve the next position in the order of submission, for `Request.order`."""
        self._num_submitted += 1
        return self._num_submitted - 1

    def _next_order(self, request: Request) -> int:
        return request.order if request.order >= 0 else self.take_place()

    def _make_builder(self, limits: StepLimits) -> PlanBuilder:
        return PlanBuilder(replace(limits, tokens=limits.tokens - self.state.num_aside))
