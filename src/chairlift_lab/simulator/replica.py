"""One engine on a virtual clock: the real scheduler, with predicted step times instead of a model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add

from chairlift.core.budgets.base import FixedBudget
from chairlift.core.cost_model import CostModel, StepShape, chunk_kv
from chairlift.core.plan import StepPlan, StepResult
from chairlift_lab.simulator.outcome import Gaps, RequestRecord
from chairlift_lab.simulator.quick_admission import QuickAdmission
from chairlift_lab.simulator.scheduler import SimulatedRequest, SimulatedScheduler, token_of
from chairlift_lab.simulator.steady_decodes import SteadyDecodes
from chairlift_lab.simulator.step_cost import SpeedCursor, StepCost


class Replica:
    """Runs the steps of a scheduler, each as long as `cost` predicts.

    When all running requests are decoding and none can be admitted, the next steps differ only in their duration until
    a request finishes or arrives. They are computed together, by *fast forward*; `fast_forward=False` computes them one
    by one with the same outcome. If the scheduler's decisions do not depend on decoding requests (continuous, a fixed
    budget, no tenants), those stay set aside even while a new prompt is computed, and a new request whose prompt fits
    into one step is not submitted to the scheduler at all (`quick_admission.py`).
    """

    def __init__(
        self,
        scheduler: SimulatedScheduler,
        cost: StepCost,
        *,
        fast_forward: bool = True,
        seconds_per_swap: float = 0.0,
        speed: SpeedCursor | None = None,
        learned: CostModel | None = None,
    ) -> None:
        """`seconds_per_swap`: the time to copy a block to or from host memory. `speed`: how the speed of the machine
        changes; without it, steps are exactly as long as predicted. `learned`: what the scheduler predicts steps with,
        if it does; it learns from the steps of the simulation."""
        self.scheduler = scheduler
        self.cost = cost
        self.seconds_per_swap = seconds_per_swap
        self._speed = speed
        self._learned = learned
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.gaps = Gaps()  # (length of a step, requests that were decoding in it)
        self.due: float | None = None  # the next time to call `wake`; None if there is nothing to do
        self._aside = SteadyDecodes(scheduler)
        # In flight: a step with a plan of the scheduler, or with quickly admitted requests, or with neither; or a fast
        # forward.
        self._busy = False
        self._plan: StepPlan | None = None
        self._admitted: list[SimulatedRequest] = []  # The step computes their whole prompts.
        self._forward_steps: list[float] = []  # duration of each step
        self._forward_ends: list[float] = []  # its start, and the end of each of its steps
        limits = scheduler.budget.most
        # Only then every decoding request gets a token in every step.
        self.fast_forward = fast_forward and limits.tokens >= scheduler.max_batch_requests
        self._first_come = not scheduler.ordering.has_claims
        self._quick_admission: QuickAdmission | None = None  # if nothing depends on decoding requests
        independent = scheduler.policy.always_open and not scheduler.ordering.depends_on_output
        independent = independent and scheduler.state.lengths is None
        if self.fast_forward and independent and isinstance(scheduler.budget, FixedBudget):
            self._quick_admission = QuickAdmission(self._aside, limits)

    @property
    def num_cache_tokens(self) -> int:
        """Tokens for which the KV cache has room."""
        return self.scheduler.kv.pool.num_blocks * self.scheduler.kv.block_size

    def submit(self, record: RequestRecord, prompt: Sequence[int], now: float, next_arrival: float = math.inf) -> None:
        """Submit a request; no other one arrives before `next_arrival`."""
        self.scheduler.check_fits(record.n_in, record.n_out)
        simulated = SimulatedRequest(record, prompt, self.scheduler.take_place())
        if self._forward_steps:
            self._cut_fast_forward(now)
        if self._quick_admission:
            self._quick_admission.add(simulated)
        else:
            self.scheduler.enter(simulated)
        if not self._busy:
            self._begin(now, next_arrival)

    def expect_no_more(self, now: float) -> None:
        """Release batches that are not full."""
        self.scheduler.expect_no_more()
        if not self._busy:
            self._begin(now, math.inf)

    def wake(self, next_arrival: float = math.inf) -> None:
        """At time `due`: end the step in flight, or release a batch, and begin the next step."""
        assert self.due is not None
        now = self.due
        if self._forward_steps:
            self._end_fast_forward(len(self._forward_steps))
        elif self._busy:
            self._end_step(now)
        self._begin(now, next_arrival)

    # ---- a step -------------------------------------------------------------------------------------------------

    def _begin(self, now: float, next_arrival: float) -> None:
        if self.fast_forward:
            self._set_aside()
            if self._quick_admission:
                self._admitted = self._quick_admission.admit()
                if self._admitted:
                    self._aside.reserve()
                    self._take(self._shape_with_admitted(), now)
                    return
            if self._begin_fast_forward(now, next_arrival):
                return
        self._plan_step(now)

    def _plan_step(self, now: float) -> None:
        aside, scheduler, quick = self._aside, self.scheduler, self._quick_admission
        memory_is_short = False
        if aside.size and not (quick and aside.leaves_room()):
            memory_is_short = quick is not None and aside.preempt_latest(now)
            if not memory_is_short:
                aside.give_back()
        if aside.size:
            aside.reserve()
        if quick:
            quick.submit_queue()
        scheduler.memory_is_short = memory_is_short
        plan = scheduler.schedule(now)
        self.scheduler.record_events()
        if quick:
            quick.blocked = not plan and not memory_is_short
        if not plan and not aside.size:
            wakeup = scheduler.next_wakeup(now)
            self.due = wakeup if wakeup is not None and wakeup > now else None
            return
        self._plan = plan
        swaps = len(plan.swap_outs) + len(plan.swap_ins)
        self._take(self._shape_of(plan), now, swaps * self.seconds_per_swap)

    def _take(self, shape: StepShape, now: float, swapping: float = 0.0) -> None:
        seconds = self.cost.predict(shape)
        if self._speed:
            seconds = self._speed.advance(seconds)
        if self._learned:
            self._learned.observe(shape, seconds)
        seconds += swapping
        self.num_steps += 1
        self.busy_seconds += seconds
        if shape.decode_tokens:
            self.gaps.add(seconds, shape.decode_tokens)
        self._busy, self.due = True, now + seconds

    def _end_step(self, now: float) -> None:
        plan, admitted = self._plan, self._admitted
        self._busy, self._plan, self._admitted = False, None, []
        if self._aside.size:
            self._advance_aside(1, now)
        if plan:
            tokens = [token_of(chunk.request) for chunk in plan.chunks if chunk.samples]
            self.scheduler.apply(StepResult(plan, tokens, [None] * len(tokens)), now)
        if admitted:
            self._aside.add_admitted(admitted, now)
        if self.scheduler.has_events:
            self.scheduler.record_events()

    def _shape_with_admitted(self) -> StepShape:
        tokens = prefill_kv = 0
        for simulated in self._admitted:
            computed = simulated.num_computed
            count = simulated.num_known - computed
            tokens += count
            prefill_kv += chunk_kv(computed, count)
        size = self._aside.size
        return StepShape(size, tokens, self._aside.context, prefill_kv, size + len(self._admitted))

    def _shape_of(self, plan: StepPlan) -> StepShape:
        shape, aside = StepShape.of(plan), self._aside
        if not aside.size:
            return shape
        return StepShape(
            shape.decode_tokens + aside.size,
            shape.prefill_tokens,
            shape.decode_kv + aside.context,
            shape.prefill_kv,
            shape.requests + aside.size,
            shape.idle_rows,
        )

    # ---- many steps at once -------------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        """Take requests from the scheduler that only decode for now."""
        scheduler, aside = self.scheduler, self._aside
        if not scheduler.running:
            return
        if self._quick_admission:  # They would be returned at once if memory is short.
            if aside.leaves_room():
                aside.take()
        elif (not scheduler.waiting or self._batch_is_closed()) and all(
            request.decoding and request.max_new_tokens - request.num_output > 1 for request in scheduler.running
        ):
            aside.take()

    def _batch_is_closed(self) -> bool:
        """Whether no request is admitted before the whole batch has ended."""
        return self._first_come and self.scheduler.policy.closed_until_batch_ends

    def _only_decodes(self) -> bool:
        """Whether only requests set aside are running, and none can be admitted before one of them ends."""
        scheduler, aside = self.scheduler, self._aside
        if scheduler.running or not aside.size:
            return False
        return (
            self._quick_admission.admits_none()
            if self._quick_admission
            else not scheduler.waiting or self._batch_is_closed()
        )

    def _keeps_aside(self) -> bool:
        """Whether the requests set aside stay there when one of them ends."""
        return self._quick_admission is not None or self._batch_is_closed()

    def _begin_fast_forward(self, now: float, next_arrival: float) -> bool:
        """Begin all following steps that only decode; return False if there are none."""
        if not self._only_decodes():
            return False
        aside = self._aside
        size, context = aside.size, aside.context
        steps = min(aside.steps_to_next_end, aside.steps_with_room())
        if not self._keeps_aside():
            steps = min(steps, aside.steps_to_next_end - 1)  # the scheduler handles an ending
        idle = len(self.scheduler.idle)
        if next_arrival < math.inf and steps > 2:
            (first,) = self.cost.decode_steps(size, idle, context, 1)  # later ones are not predicted to be shorter
            if first > 0:
                steps = min(steps, int((next_arrival - now) / first) + 2)
        if steps <= 0:
            return False
        self._forward_steps = self.cost.decode_steps(size, idle, context, steps)
        if self._speed:
            self._forward_steps = self._speed.look_ahead(self._forward_steps)
        if self._learned:
            self._learned.observe(StepShape(size, 0, context, 0, size, idle), self._forward_steps[0])
        self._forward_ends = list(accumulate(self._forward_steps, initial=now))
        self._busy, self.due = True, self._forward_ends[-1]
        return True

    def _cut_fast_forward(self, now: float) -> None:
        """A request arrives: end the fast forward with the step in flight."""
        if self._quick_admission:
            if self._aside.size < self.scheduler.max_batch_requests:  # else none is admitted before one ends
                steps = bisect_left(self._forward_ends, now, lo=1)
                del self._forward_steps[steps:], self._forward_ends[steps + 1 :]
                self.due = self._forward_ends[-1]
            return
        if self._batch_is_closed():
            return
        # The scheduler may depend on the tokens generated so far, so it must plan the step in flight.
        steps = bisect_left(self._forward_ends, now, lo=1) - 1
        began = self._forward_ends[steps]
        self._end_fast_forward(steps)
        self._plan_step(began)

    def _end_fast_forward(self, steps: int) -> None:
        """End a fast forward after `steps` of its steps."""
        seconds, now = self._forward_steps[:steps], self._forward_ends[steps]
        if self._speed:
            self._speed.advance_steps(steps)
        self._busy, self._forward_steps, self._forward_ends = False, [], []
        self.num_steps += steps
        self.busy_seconds = reduce(add, seconds, self.busy_seconds)  # the same rounding however steps are grouped
        self.gaps.add_steps(seconds, self._aside.size)
        self._advance_aside(steps, now)
        if not self._keeps_aside():
            self._aside.give_back()
        if self.scheduler.has_events:
            self.scheduler.record_events()

    def _advance_aside(self, steps: int, now: float) -> None:
        size = self._aside.size
        self._aside.advance(steps, now)
        if self._quick_admission and self._aside.size < size:
            self._quick_admission.blocked = False
