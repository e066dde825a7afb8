"""Runs the engine for a topic, and records every step: chunks, blocks, sampled tokens, and calls of the attention."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numba
import torch
from torch import Tensor

from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.config import EngineConfig
from chairlift.core.events import Event, RequestAdmitted, RequestQueued, StepDone
from chairlift.core.executor import FinishedStep, PendingStep
from chairlift.core.plan import Chunk, StepPlan, StepResult
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, StartedEngine, load_model
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift_lab.common.engines import EngineMaker

T = TypeVar("T")
Clock = Callable[[], float]
# The clock of pictures that show times: with `one_thread` it is not disturbed by other programs.
CPU_TIME: Clock = time.process_time

PUSH = 1e6  # added to a value, so that every row with any weight on it changes

TEXTS: dict[str, Any] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))


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

    @classmethod
    def of(cls, chunk: Chunk) -> ChunkRecord:
        copies, table = tuple((copy.source, copy.target) for copy in chunk.copies), tuple(chunk.table)
        request = chunk.request.id
        return cls(request, chunk.start, chunk.count, chunk.decodes, chunk.samples, table, copies, chunk.drafts)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def kind(self) -> str:
        """How it is drawn."""
        return "decode" if self.decode else "prefill"


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

    def output(self, request: str) -> list[int]:
        """The tokens that a request got."""
        return [token for step in self.steps for token in step.sampled.get(request, ())]

    def prompt_chunks(self, request: str) -> list[int]:
        """The sizes of the chunks in which its prompt was read."""
        chunks = (chunk for step in self.steps for chunk in step.chunks if chunk.request == request)
        return [chunk.count for chunk in chunks if not chunk.decode]


def _run_recorded(
    plan: StepPlan, turn: int, scheduler: Scheduler, launch: Callable[[StepPlan], PendingStep]
) -> tuple[StepRecord, StepResult]:
    """Run a step, and return its record with its result."""
    pool, blocks = scheduler.kv.pool, range(scheduler.kv.num_blocks)
    # Recorded before the step runs: `tables` change as requests finish.
    step = StepRecord(
        turn=turn,
        step=plan.step,
        chunks=tuple(map(ChunkRecord.of, plan.chunks)),
        idle=tuple(request.id for request in scheduler.idle),
        waiting=tuple(request.id for request in scheduler.waiting),
        sampled={},
        padding=0,
        tables=scheduler.kv.tables(),
        references=tuple(map(pool.references, blocks)),
        cached=tuple(filter(pool.is_cached, blocks)),
    )
    result = launch(plan).result()
    tokens = iter(result.tokens)
    sampled = {
        chunk.request: tuple(islice(tokens, 1 + (result.accepted.get(chunk.request, 0) if chunk.drafts else 0)))
        for chunk in step.chunks
        if chunk.samples
    }
    return replace(step, sampled=sampled, padding=result.padding_tokens), result


def record(engine: Engine, requests: Sequence[TimedRequest], *, max_turns: int = 10_000) -> Run:
    """Submit `requests` at their turns and run until all are done. Decoding is greedy without early stops, so the same
    requests give the same run."""
    pending = deque(sorted(requests, key=lambda request: request.turn))
    steps: list[StepRecord] = []
    events: list[Event] = []
    turn, inner = 0, engine.executor.launch

    def launch(plan: StepPlan) -> FinishedStep:
        step, result = _run_recorded(plan, turn, engine.scheduler, inner)
        steps.append(step)
        return FinishedStep(result)

    with patch.object(engine.executor, "launch", launch):
        while pending or engine.has_work:
            while pending and pending[0].turn <= turn:
                request = pending.popleft()
                params = SamplingParams(temperature=0.0, max_tokens=request.new_tokens, ignore_eos=True, n=request.n)
                engine.submit(request.prompt, params, request_id=request.name)
            if not pending:
                engine.expect_no_more()
            # A plan is recorded before it runs: its tables and requests have changed since.
            events += (replace(event, plan=None) if isinstance(event, StepDone) else event for event in engine.step())
            engine.check_alive()
            turn += 1
            if turn > max_turns:
                raise ChairliftError(f"the run did not end within {max_turns} turns")
    turns = steps[-1].turn + 1 if steps else 0  # The last turn only reports.
    return Run(tuple(requests), tuple(steps), turns, engine.scheduler.max_batch_requests, tuple(events))


@dataclass(frozen=True, slots=True)
class TopicEngines:
    """Starts engines on the CPU in float32, so that pictures are the same on every machine."""

    loaded: LoadedModel

    @classmethod
    def load(cls, model: str, *, progress: bool = False) -> TopicEngines:
        return cls(load_model(model, EngineConfig(device="cpu", dtype="float32"), progress=progress))

    @property
    def model_name(self) -> str:
        return self.loaded.name.rstrip("/").rsplit("/", 1)[-1]

    def start(
        self, *, num_blocks: int = 64, block_size: int = 16, clock: Clock = time.monotonic, **options: Any
    ) -> StartedEngine:
        """Start an engine with a KV cache of `num_blocks`; `options` are those of EngineConfig."""
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

    def record_calls(
        self,
        requests: Sequence[TimedRequest],
        note: Callable[[AttentionCall], T],
        *,
        layer: int | None = None,
        **options: Any,
    ) -> tuple[Run, list[T]]:
        """Record a run, and what `note` makes of each call of the attention of a layer, or of all layers."""
        notes: list[T] = []

        def listen(call: AttentionCall) -> None:
            if layer is None or call.layer.index == layer:
                notes.append(note(call))

        def begin(batch: StepBatch, storage: KVStorage) -> StepAttention:
            return _ListeningStep(inner(batch, storage), batch.layout, storage, listen)

        started = self.start(prefix_caching=False, **options)
        attention = started.runner.attention
        inner = attention.begin
        # A stack in one kernel would not call `attend` layer by layer.
        capabilities = replace(attention.capabilities, has_work=False)
        with patch.multiple(attention, begin=begin, capabilities=capabilities):
            return record(started.engine, requests), notes

    def prompt(self, num_tokens: int, skip: int = 0) -> tuple[int, ...]:
        """The first `num_tokens` tokens of a text about chairlifts without its first `skip` words."""
        text = " ".join(TEXTS["chairlift"].split()[skip:])
        tokens = self.loaded.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) < num_tokens:
            raise InvalidParameter("num_tokens", f"the text has {len(tokens)} tokens, not {num_tokens}")
        return tuple(tokens[:num_tokens])

    def requests(self, sizes: Sequence[tuple[int, int, int]], *, skip: int) -> list[TimedRequest]:
        """Requests A, B, … with (prompt tokens, new tokens, turn), each of whose prompts begins `skip` words later."""
        return [
            TimedRequest(chr(ord("A") + index), self.prompt(prompt, skip=skip * index), new, turn)
            for index, (prompt, new, turn) in enumerate(sizes)
        ]

    def labels(self, tokens: Sequence[int]) -> list[str]:
        """Each token as a short piece of text for a label."""
        return [as_label(self.loaded.tokenizer.decode([token], skip_special_tokens=False)) for token in tokens]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the work is too small for more."""
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
    printable = "".join(character if character.isprintable() else "·" for character in spelled)
    return printable.strip().replace("$", r"\$") or "␣"  # a dollar starts a formula in matplotlib


# ---- calls of the attention -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Inputs and output of one layer in one step."""

    layer: AttentionLayer
    q: Tensor  # [T, heads, head_dim]
    k: Tensor  # [T, kv_heads, head_dim]
    v: Tensor
    output: Tensor  # [T, heads, head_dim]
    layout: RaggedLayout
    storage: KVStorage
    attention: StepAttention


@dataclass(frozen=True, slots=True)
class _ListeningStep(StepAttention):
    """The attention of a step that reports its calls."""

    inner: StepAttention
    layout: RaggedLayout
    storage: KVStorage
    listener: Callable[[AttentionCall], None]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        output = self.inner.attend(layer, q, k, v, sinks=sinks)
        self.listener(AttentionCall(layer, q, k, v, output, self.layout, self.storage, self.inner))
        return output


def who_sees_whom(call: AttentionCall) -> list[list[bool]]:
    """Which row attends to which position: [T rows][positions of the first sequence, then of the next, ...].

    Nothing is assumed about masks: every value in the cache is changed in turn, and the rows whose output changes
    attend to it.
    """
    ends = call.layout.ends
    columns = [_who_sees(call, sequence, position) for sequence, end in enumerate(ends) for position in range(end)]
    return torch.stack(columns, dim=1).tolist()


def _who_sees(call: AttentionCall, sequence: int, position: int) -> Tensor:
    """[T] bool: the rows whose output depends on the value of that position of that sequence."""
    layout, storage, index = call.layout, call.storage, call.layer.index
    tables, slots = layout.of_table(storage.place(index)[1])
    start = layout.starts[sequence]
    if position >= start:  # This step computes it.
        v = call.v.clone()
        v[layout.offsets[sequence] + position - start] += PUSH
        changed = call.attention.attend(call.layer, call.q, call.k, v)
        storage.write(index, slots, call.k, call.v)
    else:
        block = int(tables[sequence, position // storage.block_size])
        value = storage.values[index][block, position % storage.block_size]
        before = value.clone()
        value += PUSH
        changed = call.attention.attend(call.layer, call.q, call.k, call.v)
        value.copy_(before)
    return (changed - call.output).abs().amax(dim=(1, 2)) > 0
