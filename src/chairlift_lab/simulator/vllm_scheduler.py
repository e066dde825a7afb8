"""The documented behaviour of vLLM's scheduler (0.19), over the same accounting as ours, for comparisons.

First come, first served. Running requests come first, in order of arrival, decodes and prompts alike. A request is
admitted as soon as the blocks for its known tokens are free, even if running ones need them later. If memory is short,
the running request that came last is preempted and recomputed, and none is admitted in that step.
"""

from __future__ import annotations

from chairlift.core.plan import PlanBuilder, StepPlan
from chairlift.core.request import Request
from chairlift_lab.simulator.scheduler import SimulatedScheduler


class VLLMScheduler(SimulatedScheduler):
    """Plans steps as vLLM does."""

    admits_with_room_to_grow = False

    def schedule(self, now: float) -> StepPlan:
        builder = self._begin_plan(now)
        self._continue_running(builder, now)
        if not builder.memory_was_short:
            self._admit(builder, now)
        return self._seal(builder)

    def _continue_running(self, builder: PlanBuilder, now: float) -> None:
        for request in list(self.running):
            count = min(request.num_behind, builder.room)
            if count and request in self.running and self._make_room(request, count, builder, now):
                builder.add(request, count, self.kv.table(request), ())

    def _make_room(self, request: Request, count: int, builder: PlanBuilder, now: float) -> bool:
        """Reserve blocks; preempt the latest requests if they are short. False if `request` itself is preempted."""
        while self.kv.reserve(request, count) is None:
            builder.memory_was_short = True
            victim = self.running[-1]
            self.state.preempt(victim, now, builder)
            if victim is request:
                return False
        return True

    def _admit(self, builder: PlanBuilder, now: float) -> None:
        """Admit the first waiting requests for as long as slots, budget and blocks suffice."""
        for request in list(self.waiting):
            if not builder.room or self.state.slots_taken == self.max_batch_requests:
                return
            match = self.kv.match(request)
            self.kv.attach(request, match)
            cached = request.num_computed
            if self.kv.blocks_for(request.num_known) - len(match.blocks) > self.kv.num_free:
                self.kv.release(request)
                request.start_from(0)
                return
            count = min(request.num_behind, builder.room)
            self.kv.reserve(request, count)
            self.state.admit(request, cached, match.miss, now)
            builder.add(request, count, self.kv.table(request), ())
