"""Long prompts that arrive beside decoding requests: the traffic of `bench chunking` and of a published claim."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.core.events import BudgetDecided, Event, RequestFinished, StepDone, TokenProduced
from chairlift.errors import InvalidParameter
from chairlift.options import at_least
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.workload import full_length
from chairlift_lab.report.options import Count, Settings

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

_option = partial(typer.Option, rich_help_panel="Traffic")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingSettings(Settings):
    """Long prompts and the requests that decode beside them; lengths are in tokens."""

    decodes: Annotated[Count, _option(help="Requests that decode all the time.")] = 8
    start: Annotated[Count, _option(help="Tokens of their prompts.")] = 32
    output: Annotated[Count, _option(help="Tokens each of them generates before a new one replaces it.")] = 512
    prompts: Annotated[Count, _option(help="Long prompts per setting and round.")] = 4
    prompt_len: Annotated[Count, _option(help="Tokens of a long prompt.")] = 1024
    rounds: Annotated[Count, typer.Option(help="Repetitions of everything, with new engines.")] = 1
    seed: Annotated[int, at_least(0), _option(help="The same seed gives the same requests.")] = 0


@dataclass(slots=True)
class ChunkingRun:
    """Measurements while long prompts were computed; times are seconds."""

    seconds: float = 0.0
    tokens: int = 0  # computed: prompt tokens and generated ones
    gaps: list[float] = field(default_factory=list)  # between consecutive tokens of decoding requests
    first_tokens: list[float] = field(default_factory=list)  # time to first token of the long prompts
    steps: list[StepDone] = field(default_factory=list)
    decisions: list[BudgetDecided] = field(default_factory=list)

    def add(self, other: ChunkingRun) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TurnClock:
    """A clock that only runs inside `with`, for an engine that takes turns with others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = 0.0  # seconds of earlier turns
        self._start_time: float | None = None

    def __call__(self) -> float:
        return self._before + (0.0 if self._start_time is None else self._clock() - self._start_time)

    def __enter__(self) -> None:
        self._start_time = self._clock()

    def __exit__(self, *error: object) -> None:
        self._before, self._start_time = self(), None


def engine_for_long_prompts(
    maker: EngineMaker,
    settings: ChunkingSettings,
    *,
    max_batch_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Engine:
    """An engine with slots and memory for all requests; `max_batch_tokens` is the room beside the decodes."""
    slots, block_size = settings.decodes + 1, maker.config().block_size
    blocks = settings.decodes * -(-(settings.start + settings.output) // block_size)
    blocks += -(-(settings.prompt_len + 1) // block_size) + 2 * slots
    return maker.engine(
        max_batch_requests=slots,
        max_batch_tokens=max_batch_tokens + slots,
        kv_memory=maker.kv_memory(blocks),
        prefix_caching=False,
        clock=clock,
        **options,
    )


def run_long_prompts(
    engine: Engine, vocabulary: Sequence[int], settings: ChunkingSettings, *, warm_up: int | None = None
) -> ChunkingRun:
    """One prompt for warming up and learning (of `warm_up` tokens, or as long as the others), then those that count."""
    traffic = LongPrompts(engine, vocabulary, settings)
    traffic.warm_up(warm_up or settings.prompt_len)
    for _ in range(settings.prompts):
        traffic.measure_prompt()
    traffic.stop()
    return traffic.measured


class LongPrompts:
    """Keeps a fixed number of requests decoding and submits long prompts one by one."""

    def __init__(self, engine: Engine, vocabulary: Sequence[int], settings: ChunkingSettings) -> None:
        longest = {"prompt_len": settings.prompt_len + 1, "output": settings.start + settings.output}
        for parameter, needed in longest.items():
            if needed > engine.max_model_len:
                problem = f"{needed} tokens do not fit into the {engine.max_model_len} of this model"
                raise InvalidParameter(parameter, problem)
        self._engine, self._vocabulary, self._settings = engine, vocabulary, settings
        self._source = random.Random(settings.seed)
        self._last_token: dict[str, float | None] = {}  # The time of each decoding request's last token.
        self.measured = ChunkingRun()

    def warm_up(self, length: int) -> None:
        """Start the decoding requests, and compute one prompt that does not count."""
        for _ in range(self._settings.decodes):
            self._begin_decoding()
        while None in self._last_token.values():
            self._step()
        self._serve_prompt(length)
        self.measured = ChunkingRun()

    def measure_prompt(self) -> None:
        self.measured.seconds += self._serve_prompt(self._settings.prompt_len)

    def _serve_prompt(self, length: int) -> float:
        """Submit a prompt, wait for its first token, and return the seconds."""
        engine = self._engine
        start_time = engine.now()
        (long_id,) = engine.submit(self._words(length), full_length(1))
        while True:
            done = [event for event in self._step() if isinstance(event, TokenProduced) and event.request_id == long_id]
            if done:
                self.measured.first_tokens.append(done[0].time - start_time)
                return engine.now() - start_time

    def stop(self) -> None:
        for request_id in self._last_token:
            self._engine.cancel(request_id)
        while self._engine.has_work:
            self._engine.step()

    def _begin_decoding(self) -> None:
        words = self._words(self._settings.start)
        (request_id,) = self._engine.submit(words, full_length(self._settings.output))
        self._last_token[request_id] = None

    def _words(self, count: int) -> list[int]:
        return self._source.choices(self._vocabulary, k=count)

    def _step(self) -> list[Event]:
        events = self._engine.step()
        self._engine.check_alive()
        for event in events:
            match event:
                case TokenProduced() if event.request_id in self._last_token:
                    before = self._last_token[event.request_id]
                    if before is not None:
                        self.measured.gaps.append(event.time - before)
                    self._last_token[event.request_id] = event.time
                case RequestFinished() if event.request_id in self._last_token:
                    del self._last_token[event.request_id]
                    self._begin_decoding()
                case StepDone():
                    self.measured.steps.append(event)
                    self.measured.tokens += event.decode_tokens + event.prefill_tokens
                case BudgetDecided():
                    self.measured.decisions.append(event)
                case _:
                    pass
        return events
