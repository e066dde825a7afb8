"""A workload on this engine, timed from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chairlift.bench.measure import Advance, EngineFigures, Measurement
from chairlift.bench.workload import Workload
from chairlift.core.events import Event, RequestFinished, RequestPreempted, StepDone, TokenProduced
from chairlift.core.request import FinishReason
from chairlift.core.sampling import SamplingParams
from chairlift.errors import EngineDead, InvalidParameter

if TYPE_CHECKING:
    from chairlift.execution.engine import Engine


def measure_engine(engine: Engine, workload: Workload, advance: Advance) -> Measurement:
    """Submit all requests at once and step until they are done, after a short warm-up."""
    if workload.longest > engine.max_model_len:
        problem = f"a request of {workload.longest} tokens, prompt and output, exceeds the {engine.max_model_len}"
        raise InvalidParameter("max_model_len", f"{problem} of this model; ask for shorter ones")
    _run(engine, workload.warm_up(), lambda tokens: None)
    return _run(engine, workload, advance)


def _run(engine: Engine, workload: Workload, advance: Advance) -> Measurement:
    recorder = _Recorder()
    advance(0)
    begun = engine.now()
    ids = []
    for request in workload.requests:
        # Token ids only, no text: that is what the others are asked for too.
        params = SamplingParams(temperature=0.0, max_tokens=request.n_out, ignore_eos=True, detokenize=False)
        ids += engine.submit(request.prompt_ids, params)
    while engine.has_work:
        recorder.take_in(engine.step())
        engine.check_alive()
        advance(recorder.num_tokens)
    seconds = engine.now() - begun
    times = [[time - begun for time in recorder.token_times[request_id]] for request_id in ids]
    return Measurement(seconds, workload.input_tokens, times, recorder.figures())


class _Recorder:
    def __init__(self) -> None:
        self.token_times: dict[str, list[float]] = {}
        self.num_tokens = 0
        self._preemptions = 0
        self._steps: list[StepDone] = []

    def take_in(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TokenProduced():
                    self.token_times.setdefault(event.request_id, []).append(event.time)
                    self.num_tokens += 1
                case RequestPreempted():
                    self._preemptions += 1
                case RequestFinished() if event.ending.reason is not FinishReason.LENGTH:
                    raise EngineDead(f"a request ended early: {event.ending.reason} {event.ending.detail or ''}")
                case StepDone():
                    self._steps.append(event)
                case _:
                    pass

    def figures(self) -> EngineFigures:
        scheduling = sum(step.schedule_seconds + step.apply_seconds for step in self._steps)
        building = sum(step.timing.build for step in self._steps)
        running = sum(step.timing.total for step in self._steps)
        return EngineFigures(
            steps=len(self._steps),
            mean_batch_requests=sum(step.requests for step in self._steps) / len(self._steps),
            scheduler_share=(scheduling + building) / (scheduling + running),
            preemptions=self._preemptions,
            peak_kv_blocks=max(step.used_blocks for step in self._steps),
        )
