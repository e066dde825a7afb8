"""A run of the engine, written down step by step: who computed what, on which blocks, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from chairlift.core.events import Event, RequestAdmitted, RequestFinished, RequestQueued, StepDone
from chairlift.core.executor import Executor, ExecutorCapabilities, FinishedStep
from chairlift.core.plan import StepPlan
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.errors import ChairliftError


@dataclass(frozen=True, slots=True)
class Rider:
    """A request, and the turn of the loop at which it is submitted."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int
    turn: int = 0
    n: int = 1


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    request: str
    start: int
    count: int
    decode: bool
    samples: bool
    table: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]  # block -> block, before anything is written
    drafts: tuple[int, ...] = ()  # guesses, the last tokens of the chunk

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepRecord:
    turn: int
    step: int
    chunks: tuple[ChunkRecord, ...]
    idle: tuple[str, ...]  # finished, but they keep their seats
    waiting: tuple[str, ...]
    sampled: dict[str, tuple[int, ...]]  # request -> its next tokens; more than one where guesses were right
    padding: int  # tokens computed for nobody
    tables: dict[str, tuple[int, ...]]  # of everyone who holds blocks
    references: tuple[int, ...]  # of each block: in how many tables it stands
    cached: tuple[int, ...]  # blocks whose contents others may find


@dataclass(frozen=True, slots=True)
class Run:
    riders: tuple[Rider, ...]
    steps: tuple[StepRecord, ...]
    turns: int  # of the loop, those included in which nothing could be computed
    seats: int
    events: tuple[Event, ...]

    def done(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    def boarded(self) -> list[RequestAdmitted]:
        return [event for event in self.events if isinstance(event, RequestAdmitted)]

    def queued(self) -> list[RequestQueued]:
        return [event for event in self.events if isinstance(event, RequestQueued)]

    def finished(self) -> list[RequestFinished]:
        return [event for event in self.events if isinstance(event, RequestFinished)]


class _Recorder(Executor):
    """An executor that writes down what it passes on."""

    def __init__(self, engine: Engine) -> None:
        self.inner: Executor = engine.executor
        self.scheduler = engine.scheduler
        self.turn = 0
        self.steps: list[StepRecord] = []

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return self.inner.capabilities

    def launch(self, plan: StepPlan) -> FinishedStep:
        kv = self.scheduler.kv
        # Noted before the step runs: `tables` change as requests finish.
        chunks = tuple(
            ChunkRecord(
                chunk.request.id,
                chunk.start,
                chunk.count,
                chunk.decodes,
                chunk.samples,
                tuple(chunk.table),
                tuple((copy.source, copy.target) for copy in chunk.copies),
                chunk.drafts,
            )
            for chunk in plan.chunks
        )
        blocks = range(kv.num_blocks)
        references = tuple(kv.pool.references(block) for block in blocks)
        cached = tuple(block for block in blocks if kv.pool.is_cached(block))
        tables, waiting = kv.tables(), tuple(request.id for request in self.scheduler.waiting)
        idle = tuple(request.id for request in self.scheduler.idle)
        result = self.inner.run(plan)
        tokens = iter(result.tokens)
        sampled = {
            chunk.request: tuple(islice(tokens, 1 + (result.accepted.get(chunk.request, 0) if chunk.drafts else 0)))
            for chunk in chunks
            if chunk.samples
        }
        self.steps.append(
            StepRecord(
                self.turn,
                plan.step,
                chunks,
                idle,
                waiting,
                sampled,
                result.padding_tokens,
                tables,
                references,
                cached,
            )
        )
        return FinishedStep(result)

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


def record(engine: Engine, riders: Sequence[Rider], *, max_turns: int = 10_000) -> Run:
    """Let `riders` come at their turns and run until the last of them is done. Every choice is the likeliest token,
    and nobody stops early, so that the same riders give the same run."""
    recorder = _Recorder(engine)
    engine.executor = recorder
    coming = deque(sorted(riders, key=lambda rider: rider.turn))
    events: list[Event] = []
    turn = 0
    try:
        while coming or engine.has_work:
            while coming and coming[0].turn <= turn:
                _submit(engine, coming.popleft())
            if not coming:
                engine.expect_no_more()
            recorder.turn = turn
            events += map(_without_plan, engine.step())
            engine.check_alive()
            turn += 1
            if turn > max_turns:
                raise ChairliftError(f"the run did not end within {max_turns} turns")
    finally:
        engine.executor = recorder.inner
    seats = engine.scheduler.max_batch_requests
    turns = recorder.steps[-1].turn + 1 if recorder.steps else 0  # the last turn only reports
    return Run(tuple(riders), tuple(recorder.steps), turns, seats, tuple(events))


def _without_plan(event: Event) -> Event:
    """Plans are noted before they run; afterwards their tables and requests have changed."""
    return replace(event, plan=None) if isinstance(event, StepDone) else event


def _submit(engine: Engine, rider: Rider) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=rider.new_tokens, ignore_eos=True, n=rider.n)
    engine.submit(rider.prompt, params, request_id=rider.name)
