"""One engine on a virtual clock: the real scheduler, with a prediction in place of a model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from operator import add

from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.cost_model import StepShape, chunk_kv
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.lab.simulator.cruise import Aside
from chairlift.lab.simulator.door import Door
from chairlift.lab.simulator.pace import Walk
from chairlift.lab.simulator.records import Gaps, Record
from chairlift.lab.simulator.rider import Passengers, Rider, token_of
from chairlift.lab.simulator.roofline import StepCost


class Replica:
    """Steps of a scheduler, each as long as `cost` predicts.

    When all on board are decoding and nobody can board, the coming steps differ in nothing but their length until
    someone finishes or arrives. Those are taken in one go, a *leap*; `leaps=False` takes them one by one, with the same
    outcome. Where nothing depends on those who decode (continuous, a fixed budget, no tenants), it *cruises*: they are
    not even shown to the scheduler while a newcomer's prompt is computed; nor is a newcomer that fits into the step as
    a whole.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        *,
        leaps: bool = True,
        seconds_per_swap: float = 0.0,
        walk: Walk | None = None,
    ) -> None:
        """`seconds_per_swap`: what it takes to copy a block to host memory or back, which a step does first. `walk`:
        through a pace that changes; without one, steps are exactly as long as predicted."""
        self.scheduler = scheduler
        self.cost = cost
        self.seconds_per_swap = seconds_per_swap
        self._walk = walk
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.gaps = Gaps()  # (length of a step, requests that were decoding in it)
        self.due: float | None = None  # when it is to be woken; None if it has nothing to do
        self.on_end: Callable[[Record], None] = lambda record: None
        self._passengers = Passengers(scheduler, lambda record: self.on_end(record))
        self._aside = Aside(scheduler, self._passengers)
        # What is under way: a step with a plan of the scheduler's, or with newcomers, or with neither; or a leap.
        self._busy = False
        self._plan: StepPlan | None = None
        self._newcomers: list[Rider] = []  # those who board in the step, and compute all they know
        self._leap: list[float] = []  # seconds of each step
        self._leap_ends: list[float] = []  # when it began, and when each of its steps ends
        self._seconds_of_decodes: dict[tuple[int, int], float] = {}
        limits = scheduler.budget.most if isinstance(scheduler.budget, FixedBudget) else None
        # Only then everyone who decodes gets a token in every step.
        self.leaps = leaps and limits is not None and limits.tokens >= scheduler.max_batch_requests
        self._first_come = not scheduler.ordering.has_claims
        self._door: Door | None = None  # if it cruises
        nobody_minds = scheduler.policy.always_open and not scheduler.ordering.depends_on_output
        if self.leaps and limits and nobody_minds:
            self._door = Door(self._aside, limits)

    @property
    def preemptions(self) -> int:
        return self._passengers.preemptions

    def submit(self, record: Record, prompt: Sequence[int], now: float, next_arrival: float = math.inf) -> None:
        """`next_arrival`: nobody else comes before that. It need not be known."""
        self.scheduler.check_fits(record.n_in, record.n_out)
        rider = Rider(record, prompt, self.scheduler.take_number())
        if self._leap:
            self._cut_leap(now)
        if self._door:
            self._door.add(rider)
        else:
            self._passengers.show(rider)
        if not self._busy:
            self._begin(now, next_arrival)

    def expect_no_more(self, now: float) -> None:
        """Batches that wait to be filled need not any longer."""
        self.scheduler.expect_no_more()
        if not self._busy:
            self._begin(now, math.inf)

    def wake(self, next_arrival: float = math.inf) -> None:
        """It is `due`: what is under way is over, or a batch is released. Begin what comes next."""
        assert self.due is not None
        now = self.due
        if self._leap:
            self._end_leap(len(self._leap))
        elif self._busy:
            self._end_step(now)
        self._begin(now, next_arrival)

    # ---- a step -------------------------------------------------------------------------------------------------

    def _begin(self, now: float, next_arrival: float) -> None:
        if self.leaps:
            self._set_aside()
            if self._door:
                self._newcomers = self._door.let_in()
                if self._newcomers:
                    self._aside.reserve()
                    self._take(self._shape_with_newcomers(), now)
                    return
            if self._begin_leap(now, next_arrival):
                return
        self._ask_scheduler(now)

    def _ask_scheduler(self, now: float) -> None:
        aside, scheduler = self._aside, self.scheduler
        if aside.size and not (self._door and aside.leaves_room()):
            aside.give_back()
        if aside.size:
            aside.reserve()
        if self._door:
            self._door.show_line()
        plan = scheduler.schedule(now)
        self._passengers.take_in_events()
        if not plan and not aside.size:
            wakeup = scheduler.next_wakeup(now)
            self.due = wakeup if wakeup is not None and wakeup > now else None
            return
        self._plan = plan
        swaps = len(plan.swap_outs) + len(plan.swap_ins)
        self._take(self._shape_of(plan), now, swaps * self.seconds_per_swap)

    def _take(self, shape: StepShape, now: float, swapping: float = 0.0) -> None:
        seconds = self.cost.predict(shape)
        if self._walk:
            seconds = self._walk.go(seconds)
        seconds += swapping
        self.num_steps += 1
        self.busy_seconds += seconds
        if shape.decode_tokens:
            self.gaps.add(seconds, shape.decode_tokens)
        self._busy, self.due = True, now + seconds

    def _end_step(self, now: float) -> None:
        plan, newcomers = self._plan, self._newcomers
        self._busy, self._plan, self._newcomers = False, None, []
        if self._aside.size:
            self._aside.advance(1, now)
        if plan:
            tokens = [token_of(chunk.request) for chunk in plan.chunks if chunk.samples]
            self.scheduler.apply(StepResult(plan, tokens, [None] * len(tokens)), now)
        if newcomers:
            self._aside.welcome(newcomers, now)
        if self.scheduler.has_events:
            self._passengers.take_in_events()

    def _shape_with_newcomers(self) -> StepShape:
        tokens = prefill_kv = 0
        for rider in self._newcomers:
            computed = rider.num_computed
            count = rider.num_known - computed
            tokens += count
            prefill_kv += chunk_kv(computed, count)
        size = self._aside.size
        return StepShape(size, tokens, self._aside.context, prefill_kv, size + len(self._newcomers))

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
        """Take from the scheduler those about whom there is nothing to decide for now."""
        scheduler, aside = self.scheduler, self._aside
        if not scheduler.running:
            return
        if self._door:  # not where memory is so short that they would be back at once
            if aside.leaves_room():
                aside.take()
        elif (not scheduler.waiting or self._batch_is_closed()) and all(
            request.decoding and request.max_new_tokens - request.num_output > 1 for request in scheduler.running
        ):
            aside.take()

    def _batch_is_closed(self) -> bool:
        """Whether nothing is to be decided before the whole batch has ended: who boards, or whose turn it is."""
        return self._first_come and self.scheduler.policy.closed_until_batch_ends

    def _only_decodes(self) -> bool:
        """Nobody but those set aside is on board, and whoever waits cannot board before one of them ends."""
        scheduler, aside = self.scheduler, self._aside
        if scheduler.running or not aside.size:
            return False
        return self._door.stays_shut() if self._door else not scheduler.waiting or self._batch_is_closed()

    def _keeps_aside(self) -> bool:
        """Whether endings change nothing for those who are still set aside."""
        return self._door is not None or self._batch_is_closed()

    def _begin_leap(self, now: float, next_arrival: float) -> bool:
        """Take all steps at once in which nothing happens but one more token for everyone; False if there are none."""
        if not self._only_decodes():
            return False
        aside = self._aside
        size, context = aside.size, aside.context
        steps = min(aside.steps_to_next_end, aside.steps_with_room())
        if not self._keeps_aside():
            steps = min(steps, aside.steps_to_next_end - 1)  # an ending is the scheduler's business
        base = self._decode_seconds(size, len(self.scheduler.idle))
        per_position = self.cost.seconds_per_position
        first = base + per_position * context  # and none after it is predicted to be shorter
        if next_arrival < math.inf and first > 0:
            steps = min(steps, int((next_arrival - now) / first) + 2)
        if steps <= 0:
            return False
        self._leap = [base + per_position * read for read in range(context, context + steps * size, size)]
        if self._walk:
            self._leap = self._walk.look_ahead(self._leap)
        self._leap_ends = list(accumulate(self._leap, initial=now))
        self._busy, self.due = True, self._leap_ends[-1]
        return True

    def _cut_leap(self, now: float) -> None:
        """Someone comes: it is over with the step that is under way."""
        if self._door:
            if self._aside.size < self.scheduler.max_batch_requests:  # else he cannot board before one of them ends
                steps = bisect_left(self._leap_ends, now, lo=1)
                del self._leap[steps:], self._leap_ends[steps + 1 :]
                self.due = self._leap_ends[-1]
            return
        if self._batch_is_closed():
            return
        # The scheduler may look at what was generated so far, and so has to plan the step under way itself.
        steps = bisect_left(self._leap_ends, now, lo=1) - 1
        began = self._leap_ends[steps]
        self._end_leap(steps)
        self._ask_scheduler(began)

    def _end_leap(self, steps: int) -> None:
        """So many of its steps are over."""
        seconds, now = self._leap[:steps], self._leap_ends[steps]
        if self._walk:
            self._walk.go_ahead(steps)
        self._busy, self._leap, self._leap_ends = False, [], []
        self.num_steps += steps
        self.busy_seconds = reduce(add, seconds, self.busy_seconds)  # the same, however they are grouped
        self.gaps.add_steps(seconds, self._aside.size)
        self._aside.advance(steps, now)
        if not self._keeps_aside():
            self._aside.give_back()
        if self.scheduler.has_events:
            self._passengers.take_in_events()

    def _decode_seconds(self, size: int, idle: int) -> float:
        """What so many decodes take, but for the positions they read. The same few numbers come again and again."""
        seconds = self._seconds_of_decodes.get((size, idle))
        if seconds is None:
            seconds = self.cost.predict(StepShape(size, 0, 0, 0, size, idle))
            self._seconds_of_decodes[size, idle] = seconds
        return seconds
