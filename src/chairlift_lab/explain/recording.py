"""Runs the engine for a topic, and records every step: chunks, blocks and sampled tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from chairlift.core.events import Event, RequestAdmitted, RequestFinished, RequestQueued, StepDone
from chairlift.core.executor import Executor, ExecutorCapabilities, FinishedStep
from chairlift.core.plan import StepPlan
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.errors import ChairliftError, InvalidParameter

if TYPE_CHECKING:
    from chairlift.engine.startup import LoadedModel, StartedEngine

Clock = Callable[[], float]
# The clock of pictures that show times: with `one_thread` it is not disturbed by other programs.
CPU_TIME: Clock = time.process_time

TEXT = (
    "A chairlift never stops for boarding. Skiers who reach the top step off, others get on at the bottom, and every "
    "chair that passes can carry somebody. A cable car is different: it waits until it is full, it leaves with all of "
    "them together, and nobody gets on or off before the end of the ride. Most of the time most of its places are "
    "empty. A server for language models can work in either of these two ways. It may collect questions until it has "
    "enough of them and answer them together, so that a short answer waits for the longest one. Or it may look at "
    "every single step who is done and who is new. The second way keeps the machine busy and lets nobody wait for a "
    "stranger. The price is book-keeping: whose tokens are these, where are their keys and values, and who may look "
    "at whom? All pictures of this guide are about that book-keeping, and every one of them is drawn from a run."
)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and the turn of the loop at which it is submitted."""

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
    drafts: tuple[int, ...] = ()  # draft tokens, the last tokens of the chunk

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepRecord:
    turn: int
    step: int
    chunks: tuple[ChunkRecord, ...]
    idle: tuple[str, ...]  # finished requests that keep their slots
    waiting: tuple[str, ...]
    sampled: dict[str, tuple[int, ...]]  # request -> its next tokens; more than one with accepted drafts
    padding: int  # padding tokens
    tables: dict[str, tuple[int, ...]]  # the block table of every request that holds blocks
    references: tuple[int, ...]  # reference count of each block
    cached: tuple[int, ...]  # blocks in the prefix index


@dataclass(frozen=True, slots=True)
class Run:
    requests: tuple[TimedRequest, ...]
    steps: tuple[StepRecord, ...]
    turns: int  # turns of the loop, including those that computed nothing
    slots: int
    events: tuple[Event, ...]

    def done(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    def admitted(self) -> list[RequestAdmitted]:
        return [event for event in self.events if isinstance(event, RequestAdmitted)]

    def queued(self) -> list[RequestQueued]:
        return [event for event in self.events if isinstance(event, RequestQueued)]

    def finished(self) -> list[RequestFinished]:
        return [event for event in self.events if isinstance(event, RequestFinished)]


class _Recorder(Executor):
    """An executor that records every plan and result."""

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
        # Recorded before the step runs: `tables` change as requests finish.
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


def record(engine: Engine, requests: Sequence[TimedRequest], *, max_turns: int = 10_000) -> Run:
    """Submit `requests` at their turns and run until all are done. Decoding is greedy without early stops, so the same
    requests give the same run."""
    recorder = _Recorder(engine)
    engine.executor = recorder
    coming = deque(sorted(requests, key=lambda request: request.turn))
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
    slots = engine.scheduler.max_batch_requests
    turns = recorder.steps[-1].turn + 1 if recorder.steps else 0  # the last turn only reports
    return Run(tuple(requests), tuple(recorder.steps), turns, slots, tuple(events))


def _without_plan(event: Event) -> Event:
    """Drop the plan, which is recorded before it runs: its tables and requests have changed since."""
    return replace(event, plan=None) if isinstance(event, StepDone) else event


def _submit(engine: Engine, request: TimedRequest) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=request.new_tokens, ignore_eos=True, n=request.n)
    engine.submit(request.prompt, params, request_id=request.name)


@dataclass(frozen=True, slots=True)
class TopicEngines:
    """Starts engines on the CPU in float32, so that pictures are the same on every machine."""

    loaded: LoadedModel

    @classmethod
    def load(cls, model: str, *, progress: bool = False) -> TopicEngines:
        from chairlift.config import EngineConfig
        from chairlift.engine.startup import load_model

        return cls(load_model(model, EngineConfig(device="cpu", dtype="float32"), progress=progress))

    @property
    def model_name(self) -> str:
        return self.loaded.name.rstrip("/").rsplit("/", 1)[-1]

    def start(
        self, *, num_blocks: int = 64, block_size: int = 16, clock: Clock = time.monotonic, **options: Any
    ) -> StartedEngine:
        """Start an engine with a KV cache of `num_blocks`; `options` are those of EngineConfig."""
        from chairlift_lab.common.engines import EngineMaker

        maker = EngineMaker(self.loaded, {"device": "cpu", "dtype": "float32", "block_size": block_size})
        return maker.start(
            clock=clock,
            kv_memory=maker.kv_memory(num_blocks),
            max_model_len=min(self.loaded.model.max_len, num_blocks * block_size),
            **options,
        )

    def record(self, requests: Sequence[TimedRequest], **options: Any) -> Run:
        """Record a run of these requests on a new engine."""
        return record(self.start(**options).engine, requests)

    def prompt(self, num_tokens: int, skip: int = 0) -> tuple[int, ...]:
        """The first `num_tokens` tokens of TEXT without its first `skip` words."""
        text = " ".join(TEXT.split()[skip:])
        tokens = self.loaded.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) < num_tokens:
            raise InvalidParameter("num_tokens", f"the text has {len(tokens)} tokens, not {num_tokens}")
        return tuple(tokens[:num_tokens])

    def labels(self, tokens: Sequence[int]) -> list[str]:
        """Each token as a short piece of text for a label."""
        return [as_label(self.loaded.tokenizer.decode([token], skip_special_tokens=False)) for token in tokens]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the work is too small for more."""
    import numba
    import torch

    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)


def as_label(text: str) -> str:
    """Text for a label: without characters that it cannot show and without surrounding spaces."""
    spelled = text.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", "·")
    shown = "".join(character if character.isprintable() else "·" for character in spelled)
    return shown.strip().replace("$", r"\$") or "␣"  # a dollar starts a formula in matplotlib
