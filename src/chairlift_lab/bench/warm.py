"""Greedy answers that should not depend on what else is computed or cached: how many of their tokens differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.core.events import RequestAdmitted, RequestPreempted, TokenProduced
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.speculation import encode_prompt
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.workload import SCENARIOS, full_length
from chairlift_lab.report.options import Count, Settings, parse_names

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSettings(Settings):
    """The defaults take about half an hour on two cores with the default model."""

    chats: Annotated[Count, typer.Option(help="Number of prompts.")] = 200
    answer: Annotated[Count, typer.Option(help="Tokens generated for each.")] = 16
    others: Annotated[Count, typer.Option(help="Requests in flight beside each, in the ways that have others.")] = 16
    chunk: Annotated[int, at_least(2), typer.Option(help="Most tokens of a step where prompts are cut.")] = 37


@dataclass(slots=True)
class Answers:
    """The tokens of each prompt, and what happened meanwhile."""

    tokens: list[list[int]] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0


def answer(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, in_flight: int) -> Answers:
    """Generate `tokens` tokens greedily for each prompt, with up to `in_flight` requests at a time."""
    result = Answers([[] for _ in prompts])
    waiting: Iterator[tuple[int, Sequence[int]]] = iter(enumerate(prompts))
    unfinished: dict[str, int] = {}
    while True:
        for index, prompt in islice(waiting, in_flight - len(unfinished)):
            (request_id,) = engine.submit(prompt, full_length(tokens))
            unfinished[request_id] = index
        if not unfinished:
            return result
        for event in engine.step():
            match event:
                case TokenProduced():
                    produced = result.tokens[unfinished[event.request_id]]
                    produced.append(event.token)
                    if len(produced) == tokens:
                        del unfinished[event.request_id]
                case RequestAdmitted():
                    result.cached_tokens += event.cached_tokens
                case RequestPreempted():
                    result.preemptions += 1
                case _:
                    pass
        engine.check_alive()


@dataclass(frozen=True, slots=True)
class WarmRun:
    """The prompts, and the engines that answer them in several ways."""

    maker: EngineMaker
    settings: WarmSettings
    prompts: Sequence[Sequence[int]]

    def answer(self, *, passes: int = 1, in_flight: int = 1, **changes: Any) -> Answers:
        """The answers of the last pass over all prompts by one engine with these options, whose cache holds them all
        unless they say otherwise."""
        engine = self.maker.engine(**({"kv_memory": self.memory(self.prompts)} | changes))
        for _ in range(passes):
            answers = answer(engine, self.prompts, self.settings.answer, in_flight)
        return answers

    def memory(self, prompts: Sequence[Sequence[int]]) -> int:
        """Bytes of the cache that these prompts and their answers fill."""
        block_size = self.maker.config().block_size
        return self.maker.kv_memory(sum((len(prompt) + self.settings.answer) // block_size + 1 for prompt in prompts))

    def alone(self) -> Answers:
        """Each prompt by itself, nothing cached: what the other ways are compared with."""
        return self.answer(prefix_caching=False)

    def twice(self) -> Answers:
        """Each prompt by itself, for the second time."""
        return self.answer(passes=2)

    def together(self) -> Answers:
        """Among others, nothing cached."""
        return self.answer(in_flight=1 + self.settings.others, prefix_caching=False)

    def together_twice(self) -> Answers:
        """Among others, behind cached prefixes."""
        return self.answer(passes=2, in_flight=1 + self.settings.others)

    def evicted(self) -> Answers:
        """Among others for the second time, in a cache that holds four of them, so that blocks are evicted and requests
        preempted."""
        memory = self.memory(sorted(self.prompts, key=len)[-4:])
        return self.answer(passes=2, in_flight=1 + self.settings.others, kv_memory=memory)

    def chunks(self) -> Answers:
        """Among others, prompts cut into small chunks of changing length."""
        budget = self.settings.chunk
        return self.answer(in_flight=1 + self.settings.others, max_batch_tokens=budget, max_batch_requests=budget - 1)


WAYS: dict[str, Callable[[WarmRun], Answers]] = {
    "twice": WarmRun.twice,
    "together": WarmRun.together,
    "together-twice": WarmRun.together_twice,
    "evicted": WarmRun.evicted,
    "chunks": WarmRun.chunks,
}


def compare_answers(
    maker: EngineMaker,
    settings: WarmSettings,
    *,
    ways: Sequence[str] = tuple(WAYS),
    note: Note = lambda text: None,
) -> list[dict[str, Any]]:
    """A row for each way, with the number of tokens that are not those of the prompt alone."""
    kinds = list(SCENARIOS.values())
    texts = [kinds[index % len(kinds)](index // len(kinds)) for index in range(settings.chats)]
    run = WarmRun(maker, settings, [encode_prompt(maker, text) for text in texts])
    rows: list[dict[str, Any]] = []
    reference = Answers()
    for name, way in {"alone": WarmRun.alone, **{name: WAYS[name] for name in ways}}.items():
        note(name)
        start_time = time.perf_counter()
        answers = way(run)
        reference = reference if rows else answers
        differing = [
            sum(map(int.__ne__, tokens, expected))
            for tokens, expected in zip(answers.tokens, reference.tokens, strict=True)
        ]
        rows.append(
            {
                "name": name,
                "requests": len(answers.tokens),
                "output_tokens": sum(map(len, answers.tokens)),
                "differing_tokens": sum(differing),
                "differing_requests": sum(count > 0 for count in differing),
                "cached_tokens": answers.cached_tokens,
                "preemptions": answers.preemptions,
                "seconds": time.perf_counter() - start_time,
            }
        )
    return rows


COLUMNS = (
    Column("", "name"),
    Column("Chats", "requests", ","),
    Column("Tokens", "output_tokens", ","),
    Column("Differing\ntokens", "differing_tokens", ","),
    Column("Differing\nchats", "differing_requests", ","),
    Column("Cached\ntokens", "cached_tokens", ","),
    Column("Preemptions", "preemptions", ","),
)
CAPTION = "Differing: from the answer to the same prompt alone, greedy. Cached: prompt tokens found in the cache"


@bench("warm", "chairlift bench warm", "chairlift bench warm --chats 40 --quantization blocks")
def bench_warm(
    context: typer.Context,
    engine: EngineOptions,
    settings: WarmSettings,
    note: Note,
    ways: Annotated[str, typer.Option(help="How prompts are answered, separated by commas.")] = ",".join(WAYS),
) -> BenchResult:
    """Whether greedy answers stay the same behind cached prefixes, among others, after eviction and in chunks.

    Each prompt is first answered alone with nothing cached, then in every
    way. Tokens that differ are counted; on a CPU there should be none.
    """
    refuse_given(
        context, ("kv_memory", "max_batch_tokens", "max_batch_requests", "prefix_caching"), "is chosen by this bench"
    )
    chosen = parse_names("ways", ways, WAYS)
    maker = EngineMaker.from_options(engine, note)
    rows: Sequence[Mapping[str, Any]] = compare_answers(maker, settings, ways=chosen, note=note)
    report = maker.settings() | asdict(settings) | {"ways": chosen}
    return BenchResult(report, rows, [Table("Warm and cold", COLUMNS, rows, CAPTION)])
