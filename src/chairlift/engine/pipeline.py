"""Steps in flight: launched, but not read yet.

A GPU computes a step while the host plans the next one, so the engine may be one step ahead of what it has read:

    host      plan 1 | plan 2 | read 1, plan 3 | read 2, plan 4 | ...
    device             1        2                3                4

With `steps_ahead` 0, as on a CPU, a step is read as soon as it is launched. The same holds while steps carry drafts,
because drafts continue the last token and that must be read first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import StepDone
from chairlift.core.executor import PendingStep
from chairlift.core.plan import StepPlan, StepResult
from chairlift.core.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepInFlight:
    plan: StepPlan
    pending: PendingStep
    begun: float
    schedule_seconds: float
    used_blocks: int
    waited: bool  # planned only once the step before it was read, for the sake of drafts


class Pipeline:
    """The steps in flight, oldest first, and how long each of them took."""

    def __init__(self, scheduler: Scheduler, steps_ahead: int) -> None:
        self._scheduler = scheduler
        self._steps_ahead = steps_ahead
        self._steps: deque[StepInFlight] = deque()
        self._begun = 0.0  # when this turn of the engine's loop began
        self._waits = False  # whether it plans nothing before all steps are read, though the executor works ahead
        self._last_ended = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def _depth(self) -> int:
        """How many steps may be in flight when the next one is planned."""
        speculation = self._scheduler.speculation
        return 0 if speculation is not None and speculation.drafting else self._steps_ahead

    def begin(self, now: float) -> bool:
        """Begin a turn of the engine's loop; return whether a step may be planned before the oldest one is read."""
        depth = self._depth
        self._begun, self._waits = now, depth < self._steps_ahead
        return len(self._steps) <= depth

    def add(self, plan: StepPlan, pending: PendingStep, scheduled: float) -> None:
        """Note a step that was launched in this turn, and when its planning was done."""
        used = self._scheduler.kv.pool.num_used
        self._steps.append(StepInFlight(plan, pending, self._begun, scheduled - self._begun, used, self._waits))

    def due(self, launched: bool) -> StepInFlight | None:
        """The oldest step, if it is to be read in this turn: always if nothing was `launched` in it."""
        return self._steps[0] if len(self._steps) > (self._depth if launched else 0) else None

    def finish(self, step: StepInFlight, result: StepResult, cost: CostModel, read: float, ended: float) -> StepDone:
        """Remove the oldest step, which was read at `read` and applied at `ended`; let `cost` learn its duration."""
        self._steps.popleft()
        # A step that was queued behind another one ran only after that had ended.
        seconds = ended - max(step.begun, self._last_ended)
        self._last_ended = ended
        shape = StepShape.of(step.plan)
        predicted = cost.predict(shape) or None
        # Launching a later step took time out of this one's.
        typical = all(other.pending.typical for other in (step, *self._steps))
        speculation = self._scheduler.speculation
        running = seconds if speculation is None else speculation.observe(result, seconds, step.waited, typical)
        if self._scheduler.images is not None:
            timing = result.timing
            tokens = shape.prefill_tokens if shape.prefill_tokens >= shape.decode_tokens else 0
            self._scheduler.images.observe(step.plan.encoding.units, timing.encode, tokens, timing.forward)
        if typical and step.plan.chunks:
            cost.observe(shape, running - result.timing.encode)
        return StepDone(
            time=read,
            step=step.plan.step,
            decode_tokens=shape.decode_tokens,
            prefill_tokens=shape.prefill_tokens,
            requests=shape.requests,
            waiting=len(self._scheduler.waiting),
            used_blocks=step.used_blocks,
            total_blocks=self._scheduler.kv.num_blocks,
            schedule_seconds=step.schedule_seconds,
            apply_seconds=ended - read,
            timing=result.timing,
            padding_tokens=result.padding_tokens,
            seconds=seconds,
            predicted_seconds=predicted,
            speedup=None if speculation is None else speculation.speedup,
            plan=step.plan,
        )

    def drop(self) -> list[StepPlan]:
        """Remove all steps; return their plans."""
        plans = [step.plan for step in self._steps]
        self._steps.clear()
        return plans
