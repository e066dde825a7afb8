"""One engine on a virtual clock: the real scheduler, with a prediction in place of a model."""

from __future__ import annotations

from chairlift.core.cost_model import StepShape
from chairlift.core.events import Event
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.simulate.roofline import StepCost

ANY_TOKEN = 0  # what is generated does not matter, only how much


class Replica:
    """Steps of a scheduler, each as long as `cost` predicts.

    When all on board are decoding and nobody waits, the coming steps differ in nothing but their length until someone
    finishes, someone arrives or memory runs out. Those are taken in one go; `leaps=False` takes them one by one, with
    the same outcome.
    """

    def __init__(self, scheduler: Scheduler, cost: StepCost, *, leaps: bool = True) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.leaps = leaps
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.load = 0  # tokens that its open requests may still compute
        self.gaps: list[tuple[float, int]] = []  # (length of a step, requests that were decoding in it)
        self._plan: StepPlan | None = None
        self._ends_at = 0.0
        self.busy = False

    def submit(self, request: Request, now: float) -> None:
        self.scheduler.submit(request, now)
        self.load += request.num_prompt + request.max_new_tokens

    def begin(self, now: float, undisturbed_until: float) -> float | None:
        """Plan a step; returns when it ends, or when to try again, or None if there is nothing to do."""
        assert not self.busy
        if self.leaps:
            now = self._leap(now, undisturbed_until)
            if now >= undisturbed_until:  # someone arrives before these steps are over, and may join the next
                self.busy = True
                return now
        plan = self.scheduler.schedule(now)
        if not plan:
            wakeup = self.scheduler.next_wakeup(now)
            return wakeup if wakeup is not None and wakeup > now else None
        self._plan, self.busy = plan, True
        self._ends_at = now + self._take(StepShape.of(plan))
        return self._ends_at

    def end(self) -> list[Event]:
        """The step is over: apply it, and return what happened since the last one."""
        plan, self._plan, self.busy = self._plan, None, False
        if plan is None:  # nothing but steps in which nothing happened
            return []
        samples = sum(chunk.samples for chunk in plan.chunks)
        self.scheduler.apply(StepResult(plan, [ANY_TOKEN] * samples, [None] * samples), self._ends_at)
        return self.scheduler.drain_events()

    def _take(self, shape: StepShape) -> float:
        seconds = self.cost.predict(shape)
        self.num_steps += 1
        self.busy_seconds += seconds
        if shape.decode_tokens:
            self.gaps.append((seconds, shape.decode_tokens))
        return seconds

    def _leap(self, now: float, until: float) -> float:
        """Take the steps in which nothing happens but one more token for everyone; returns when they are over."""
        scheduler = self.scheduler
        running = scheduler.running
        if not running or scheduler.waiting or scheduler.idle or not all(request.decoding for request in running):
            return now
        most = self._steps_with_room(min(request.max_new_tokens - request.num_output for request in running) - 1)
        count, context = 0, sum(request.num_known for request in running)
        size = len(running)
        while count < most and now < until:
            now += self._take(StepShape(size, 0, context, 0, size))
            context += size
            count += 1
        for request in running if count else ():
            scheduler.kv.reserve(request, count)
            request.extend([ANY_TOKEN] * count)
            request.start_from(request.num_computed + count)
            scheduler.kv.commit(request)
            scheduler.ordering.grew(request)
        return now

    def _steps_with_room(self, most: int) -> int:
        """So many steps as surely find blocks for everyone."""
        kv, size = self.scheduler.kv, len(self.scheduler.running)
        return max(0, min(most, (kv.num_free // size) * kv.block_size))
