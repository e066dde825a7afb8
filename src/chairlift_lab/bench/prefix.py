"""Prefix caching on and off, on three kinds of traffic with common prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engines import EngineMaker, Session, run_sessions
from chairlift_lab.common.workload import BenchRequest, TokenSource
from chairlift_lab.report.options import Count, Plot, ReportOptions, Settings, parse_names, picture

_chat, _rag, _agents = (partial(typer.Option, rich_help_panel=panel) for panel in ("Chat", "RAG", "Agents"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings(Settings):
    """Lengths are in tokens. The defaults take a minute or two on two cores with the default model."""

    answer: Annotated[Count, typer.Option(help="Tokens generated per request.")] = 16
    message: Annotated[Count, typer.Option(help="Tokens of a message, a question or a tool result.")] = 24
    seed: Annotated[int, at_least(0), typer.Option(help="The same seed gives the same requests.")] = 0
    users: Annotated[Count, _chat(help="Number of conversations.")] = 8
    turns: Annotated[Count, _chat(help="Messages per conversation.")] = 4
    system: Annotated[Count, _chat(help="Tokens of the shared system prompt.")] = 48
    documents: Annotated[Count, _rag(help="Number of documents.")] = 4
    document: Annotated[Count, _rag(help="Tokens per document.")] = 256
    questions: Annotated[Count, _rag(help="Questions, each about one document.")] = 16
    agents: Annotated[Count, _agents(help="Number of agents.")] = 8
    tools: Annotated[Count, _agents(help="Tokens of the shared tool list.")] = 384
    steps: Annotated[Count, _agents(help="Successive calls per agent.")] = 3


MEMORY_SHARE = 0.5  # A share of what all sessions need: memory limits the batch.


def chat(settings: PrefixSettings, tokens: TokenSource) -> list[Session]:
    """Conversations in which every turn repeats all turns before it."""
    return _sessions(settings.users, tokens.draw(settings.system), settings.turns, settings, tokens)


def rag(settings: PrefixSettings, tokens: TokenSource) -> list[Session]:
    """Single questions, several of them about the same document."""
    documents = [tokens.draw(settings.document) for _ in range(settings.documents)]
    return [
        Session((BenchRequest(documents[index % len(documents)] + tokens.draw(settings.message), settings.answer),))
        for index in range(settings.questions)
    ]


def agents(settings: PrefixSettings, tokens: TokenSource) -> list[Session]:
    """A long tool list that never changes, then a task, then tool results one after the other."""
    return _sessions(settings.agents, tokens.draw(settings.tools), settings.steps, settings, tokens)


def _sessions(
    count: int, common: tuple[int, ...], turns: int, settings: PrefixSettings, tokens: TokenSource
) -> list[Session]:
    def session() -> Session:
        messages = [tokens.draw(settings.message) for _ in range(turns)]
        prompts = [common + messages[0], *messages[1:]]
        return Session(tuple(BenchRequest(prompt, settings.answer) for prompt in prompts))

    return [session() for _ in range(count)]


SCENARIOS: dict[str, Callable[[PrefixSettings, TokenSource], list[Session]]] = {
    "chat": chat,
    "rag": rag,
    "agents": agents,
}


def compare_prefix_caching(
    maker: EngineMaker,
    settings: PrefixSettings,
    *,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    note: Note = lambda text: None,
) -> list[dict[str, Any]]:
    """A row for each kind of traffic without caching, then with it: the same sessions and memory, a slot for each."""
    rows = []
    vocabulary, block_size = maker.vocabulary(), maker.config().block_size
    for scenario in scenarios:
        sessions = SCENARIOS[scenario](settings, TokenSource(vocabulary, f"{scenario} {settings.seed}"))
        needs = [-(-session.longest // block_size) for session in sessions]
        num_blocks = max(int(sum(needs) * MEMORY_SHARE), max(needs) + 1)
        for caching in (False, True):
            name = f"{scenario}, {'with' if caching else 'without'} prefix caching"
            note(name)
            engine = maker.engine(
                prefix_caching=caching, kv_memory=maker.kv_memory(num_blocks), max_batch_requests=len(sessions)
            )
            row = run_sessions(engine, sessions).row(name)
            row |= {"scenario": scenario, "prefix_caching": caching}
            rows.append(row | {"hit_rate": row["cached_tokens"] / row["input_tokens"], "kv_blocks": num_blocks})
    return rows


def prefix_panels(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    figures = (
        ("Prompt tokens found in the cache", "%", "hit_rate", 100.0),
        ("Time to first token, median", "seconds", "ttft_p50_ms", 1e-3),
        ("Requests in a step", "mean", "mean_batch_requests", 1.0),
        ("Output tokens per second", "", "output_tokens_per_s", 1.0),
    )
    return [
        Plot(
            title=title,
            rows=rows,
            x="scenario",
            y=key,
            series=lambda row: "with prefix caching" if row["prefix_caching"] else "without",
            factor=factor,
            y_label=unit,
            colours=("tab:orange", "tab:blue"),
        )
        for title, unit, key, factor in figures
    ]


COLUMNS = (
    Column("", "scenario"),
    Column("Caching", lambda row: "on" if row["prefix_caching"] else "off"),
    Column("Hit rate", "hit_rate", ".0%"),
    Column("TTFT\np50 ms", "ttft_p50_ms", ",.0f"),
    Column("TTFT\np95 ms", "ttft_p95_ms", ",.0f"),
    Column("Batch\nmean", "mean_batch_requests", ".1f"),
    Column("Batch\nmost", "peak_batch_requests"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
)
CAPTION = "Hit rate: share of the prompt tokens found in the cache. Batch: requests per step"


@bench(
    "prefix",
    "chairlift bench prefix",
    "chairlift bench prefix --scenarios agents --tools 1000 -q",
    report=ReportOptions,
)
def bench_prefix(
    context: typer.Context,
    engine: EngineOptions,
    settings: PrefixSettings,
    note: Note,
    scenarios: Annotated[str, typer.Option(help="Traffic to measure, separated by commas.")] = "chat,rag,agents",
) -> BenchResult:
    """Prefix caching on traffic with common prefixes: multi-turn chat, RAG documents and agents' tool lists.

    All conversations start at once and send the next message as soon as the
    previous answer is complete. The KV cache holds half of what all of them
    would need without sharing.
    """
    refuse_given(
        context, ("kv_memory", "memory_share", "max_batch_requests", "prefix_caching"), "is chosen by this bench"
    )
    chosen = parse_names("scenarios", scenarios, SCENARIOS)
    maker = EngineMaker.from_options(engine, note)
    rows = compare_prefix_caching(maker, settings, scenarios=chosen, note=note)
    return BenchResult(
        maker.settings() | asdict(settings) | {"scenarios": chosen},
        rows,
        [Table("Prefix caching", COLUMNS, rows, CAPTION)],
        picture("Prefix caching", prefix_panels(rows)),
    )
