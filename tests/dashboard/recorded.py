"""Scheduler runs with a recorder, and the expected content of its frames."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from chairlift.core.cost_model import StepShape
from chairlift.core.events import Event, RequestFinished, StepDone
from chairlift.core.integrity import check_accounting
from chairlift.core.plan import StepPlan, StepTiming
from chairlift.core.policies.base import make_policy
from chairlift.core.request import Ending, FinishReason, Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.snapshot import SchedulerObserver
from chairlift.server.dashboard.recorder import SHOWN_WAITING, FrameData, StepRecorder
from tests.core.driving import make_request, make_scheduler, run_plan


@dataclass
class RecordedRun:
    scheduler: Scheduler
    steps_per_frame: int = 3
    frames: list[FrameData] = field(default_factory=list)
    shapes: list[list[tuple[str, int, int]]] = field(
        default_factory=list
    )  # (id, start, count) of the chunks of each step
    idle: list[int] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)  # output tokens of finished requests
    tables: list[dict[str, tuple[int, ...]]] = field(default_factory=list)  # block tables at each frame
    pools: list[list[tuple[int, bool]]] = field(
        default_factory=list
    )  # (references, cached) of each block at each frame
    requests: dict[str, Request] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.recorder = StepRecorder(SchedulerObserver(self.scheduler, SHOWN_WAITING))
        self.frames.append(self.recorder.keyframe(self.now, 1000.0))
        self._note_memory()

    def submit(self, request_id: str, prompt: Any, new: int, **options: Any) -> None:
        n = options.pop("n", 1)
        leader = None
        for index in range(n):
            name = request_id if index == 0 else f"{request_id}#{index}"
            request = make_request(
                name,
                prompt,
                new,
                params=SamplingParams(max_tokens=new, n=n),
                arrival=self.now,
                leader=leader,
                **options,
            )
            self.scheduler.submit(request, self.now)
            self.requests[name] = request
            leader = leader or request

    def step(self) -> None:
        begun, self.now = self.now, self.now + 0.01
        plan = self.scheduler.schedule(begun)
        if plan:
            self.scheduler.apply(run_plan(plan), self.now)
        check_accounting(self.scheduler)
        events = self.scheduler.drain_events()
        for event in events:
            if isinstance(event, RequestFinished):
                self.outputs[event.request_id] = self.requests[event.request_id].num_output
        self.recorder.record([*events, *self._done(plan)])
        if len(self.shapes) % self.steps_per_frame == 0:
            self.frame()

    def _done(self, plan: StepPlan) -> list[Event]:
        if not plan:
            return []
        shape = StepShape.of(plan)
        self.shapes.append([(chunk.request.id, chunk.start, chunk.count) for chunk in plan.chunks])
        self.idle.append(plan.idle_rows)
        numbers = (shape.decode_tokens, shape.prefill_tokens, shape.requests, len(self.scheduler.waiting))
        return [StepDone(self.now, plan.step, *numbers, 0, 0, 0.0, 0.0, StepTiming(), seconds=0.01, plan=plan)]

    def frame(self) -> None:
        self.frames.append(self.recorder.frame(self.now))
        self._note_memory()

    def _note_memory(self) -> None:
        pool = self.scheduler.kv.pool
        self.tables.append({name: table for name, table in self.scheduler.kv.tables().items() if table})
        self.pools.append([(pool.references(block), pool.is_cached(block)) for block in range(pool.num_blocks)])

    def run_to_end(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.step()
        self.frame()


def random_run(seed: int, **options: Any) -> RecordedRun:
    """Run thirty requests, some with several completions, shared prefixes or a cancellation, in too little memory."""
    chance = random.Random(seed)
    settings = {
        "num_blocks": chance.choice([12, 30]),
        "max_batch_tokens": chance.choice([8, 24]),
        "max_batch_requests": 5,
    }
    run = RecordedRun(make_scheduler(**{**settings, **options}), steps_per_frame=chance.randint(1, 6))
    for number in range(30):
        shared = list(range(chance.choice([4, 8, 12])))
        prompt = chance.choice([chance.randint(1, 20), [*shared, 500 + number]])
        if chance.random() < 0.15:
            run.submit(f"r{number}", prompt, chance.randint(1, 8), n=chance.randint(2, 3))
        else:
            run.submit(f"r{number}", prompt, chance.randint(1, 14))
        for _ in range(chance.randint(0, 4)):
            run.step()
        if chance.random() < 0.1:
            run.scheduler.finish(f"r{chance.randint(0, number)}", Ending(FinishReason.CANCELLED), run.now)
        if chance.random() < 0.08:
            run.scheduler.switch_policy(make_policy(chance.choice(["continuous", "static", "dynamic"]), None))
    run.scheduler.expect_no_more()
    run.run_to_end()
    return run


def read_back(frames: list[FrameData]) -> tuple[list[list[tuple[str, int, int]]], Counter[str]]:
    """Return the chunks of every step and the number of endings by request id, from the frames."""
    names: dict[int, str] = {}
    steps: list[list[tuple[str, int, int]]] = []
    endings: Counter[str] = Counter()
    for frame in frames:
        first = len(steps)
        names |= {given[0]: given[1] for given in (*frame.get("new", ()), *frame.get("requests", ()))}
        steps += [[] for _ in frame.get("steps", ())]
        for handle, index, count, start in frame.get("runs", ()):
            for offset in range(count):
                steps[first + index + offset].append((names[handle], start + offset, 1))
        for handle, index, start, count, *_ in frame.get("chunks", ()):
            steps[first + index].append((names[handle], start, count))
        endings.update(names[given[0]] for given in frame.get("end", ()))
    return steps, endings
