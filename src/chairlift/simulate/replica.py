"""One engine on a virtual clock: the real scheduler, with a prediction in place of a model."""

from __future__ import annotations

from chairlift.core.budget import FixedBudget
from chairlift.core.cost_model import StepShape, chunk_kv
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.policy import ContinuousPolicy
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.simulate.cruise import ANY_TOKEN, Aside
from chairlift.simulate.roofline import StepCost


class Replica:
    """Steps of a scheduler, each as long as `cost` predicts.

    When all on board are decoding and nobody can board, the coming steps differ in nothing but their length until
    someone finishes or arrives. Those are taken in one go; `leaps=False` takes them one by one, with the same outcome.
    Where nothing depends on those who decode (first come first served, continuous, a fixed budget), they are not even
    shown to the scheduler while a newcomer's prompt is computed; nor is a newcomer that fits into the step as a whole.
    """

    def __init__(
        self, scheduler: Scheduler, cost: StepCost, *, leaps: bool = True, seconds_per_swap: float = 0.0
    ) -> None:
        """`seconds_per_swap`: what it takes to copy a block to host memory or back, which a step does first."""
        self.scheduler = scheduler
        self.cost = cost
        self.seconds_per_swap = seconds_per_swap
        self.leaps = leaps
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.load = 0  # tokens that its open requests may still compute
        self.gaps: list[tuple[float, int]] = []  # (length of a step, requests that were decoding in it)
        self.busy = False
        self._plan: StepPlan | None = None
        self._newcomers: list[Request] = []  # those who compute their whole prompts in the step, besides its plan
        self._ends_at = 0.0
        self._seconds_of_decodes: dict[tuple[int, int], float] = {}
        self._aside = Aside(scheduler)
        budget = scheduler.budget
        cruises = (
            isinstance(scheduler.policy, ContinuousPolicy)
            and isinstance(budget, FixedBudget)
            and not scheduler.ordering.has_claims
            and budget.most.tokens >= scheduler.max_batch_requests  # everyone gets a token in every step
        )
        self._cruises = budget.most if cruises and isinstance(budget, FixedBudget) else None

    def submit(self, request: Request, now: float) -> None:
        self.scheduler.submit(request, now)
        self.load += request.num_prompt + request.max_new_tokens

    def begin(self, now: float, undisturbed_until: float) -> float | None:
        """Plan a step; returns when it ends, or when to try again, or None if there is nothing to do."""
        assert not self.busy
        if self.leaps:
            now = self._leap(now, undisturbed_until)
            if self._cruises and self._aside.all_fit(self._cruises):
                self._newcomers = self._aside.board_all()
            elif self._aside and not self._room_beside_them():
                self._aside.give_back()
        plan = None if self._newcomers or self._only_decodes() else self.scheduler.schedule(now)
        if not plan and not self._newcomers and not self._aside:
            wakeup = self.scheduler.next_wakeup(now)
            return wakeup if wakeup is not None and wakeup > now else None
        self._plan, self.busy = plan, True
        swaps = len(plan.swap_outs) + len(plan.swap_ins) if plan else 0
        self._ends_at = now + self._take(self._shape(plan), swaps * self.seconds_per_swap)
        return self._ends_at

    def end(self) -> None:
        """The step is over: apply it."""
        plan, self._plan, self.busy = self._plan, None, False
        if plan:
            samples = sum(chunk.samples for chunk in plan.chunks)
            self.scheduler.apply(StepResult(plan, [ANY_TOKEN] * samples, [None] * samples), self._ends_at)
        if self._aside:
            self._aside.advance(1, self._ends_at)
        if self._newcomers:
            self._aside.welcome(self._newcomers, self._ends_at)
            self._newcomers = []

    def _shape(self, plan: StepPlan | None) -> StepShape:
        size, context, idle = len(self._aside), self._aside.context, len(self.scheduler.idle)
        if not plan:
            tokens = prefill_kv = 0
            for request in self._newcomers:
                tokens += request.num_prompt
                prefill_kv += chunk_kv(0, request.num_prompt)
            return StepShape(size, tokens, context, prefill_kv, size + len(self._newcomers), idle)
        shape = StepShape.of(plan)
        if not size:
            return shape
        return StepShape(
            shape.decode_tokens + size,
            shape.prefill_tokens,
            shape.decode_kv + context,
            shape.prefill_kv,
            shape.requests + size,
            idle,
        )

    def _take(self, shape: StepShape, swapping: float = 0.0) -> float:
        seconds = self.cost.predict(shape) + swapping
        self.num_steps += 1
        self.busy_seconds += seconds
        if shape.decode_tokens:
            self.gaps.append((seconds, shape.decode_tokens))
        return seconds

    # ---- many steps at once -------------------------------------------------------------------------------------

    def _only_decodes(self) -> bool:
        return bool(self._aside) and not self.scheduler.running and self._nobody_boards()

    def _nobody_boards(self) -> bool:
        """Whoever waits cannot be given a seat, whatever the scheduler would think of it."""
        scheduler = self.scheduler
        if not scheduler.waiting:
            return True
        return self._cruises is not None and len(scheduler.running) + len(self._aside) >= scheduler.max_batch_requests

    def _room_beside_them(self) -> bool:
        return self._aside.steps_with_room() > 0 if self._only_decodes() else self._aside.leaves_room()

    def _may_set_aside(self) -> bool:
        scheduler = self.scheduler
        if self._cruises:  # not where memory is so short that they would be back at once
            return self._aside.spare_blocks > 3 * (len(scheduler.running) + len(self._aside))
        return not scheduler.waiting and all(request.decoding for request in scheduler.running)

    def _leap(self, now: float, until: float) -> float:
        """Take the steps in which nothing happens but one more token for everyone, and that are over before `until`;
        returns when they are."""
        if self._may_set_aside():
            self._aside.take()
        while self._only_decodes():
            steps = min(self._aside.steps_to_next_end, self._aside.steps_with_room())
            if not self._cruises:
                steps = min(steps, self._aside.steps_to_next_end - 1)  # an ending is the scheduler's business
            taken, now = self._take_decodes(steps, now, until)
            self._aside.advance(taken, now)
            if taken < steps or not steps:
                break
        if not self._cruises:
            self._aside.give_back()
        return now

    def _take_decodes(self, most: int, now: float, until: float) -> tuple[int, float]:
        """At most so many steps of those set aside; returns how many, and when they are over."""
        size, context = len(self._aside), self._aside.context
        base = self._decode_seconds(size, len(self.scheduler.idle))
        per_position = self.cost.seconds_per_position
        taken, gaps = 0, self.gaps
        while taken < most:
            seconds = base + per_position * context
            end = now + seconds
            if end >= until:
                break
            now = end
            self.busy_seconds += seconds
            gaps.append((seconds, size))
            context += size
            taken += 1
        self.num_steps += taken
        return taken, now

    def _decode_seconds(self, size: int, idle: int) -> float:
        """What so many decodes take, but for the positions they read. The same few numbers come again and again."""
        seconds = self._seconds_of_decodes.get((size, idle))
        if seconds is None:
            seconds = self.cost.predict(StepShape(size, 0, 0, 0, size, idle))
            self._seconds_of_decodes[size, idle] = seconds
        return seconds
