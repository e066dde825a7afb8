"""The runner of encoders, whose attention needs a whole text at once."""

from __future__ import annotations

from dataclasses import replace

from chairlift.core.executor import ExecutorCapabilities
from chairlift.core.plan import Chunk, StepPlan, StepResult, StepTiming
from chairlift.core.request import Request
from chairlift.core.sampling.params import Pooling, SamplingParams
from chairlift.runner.cpu import CPURunner


class EncoderRunner(CPURunner):
    """Computes a text in the step that plans its last tokens: all of it, whatever was planned before.

    There is no cache, so that nothing of earlier steps is needed, and nothing is reused.
    """

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(
            hidden_size=self.model.hidden_size, labels=getattr(self.model, "head", None) is not None
        )

    def _compute(self, plan: StepPlan) -> StepResult:
        complete = [chunk for chunk in plan.chunks if chunk.end >= chunk.request.num_prompt]
        if not complete:
            return StepResult(plan, [], [], StepTiming(0.0, 0.0))
        return replace(super()._compute(replace(plan, chunks=tuple(map(_whole, complete)))), plan=plan)

    def warm_up(self) -> None:
        params = SamplingParams(max_tokens=0, pooling=Pooling())
        request = Request("warm-up", [0], params, max_new_tokens=0, arrival=0.0)
        self.run(StepPlan(step=0, chunks=(Chunk(request, 0, 1, table=[0], samples=False, read=range(1)),)))
        self.forget(request.id)


def _whole(chunk: Chunk) -> Chunk:
    return replace(chunk, start=0, count=chunk.end, read=chunk.request.positions_to_read(0, chunk.end))
