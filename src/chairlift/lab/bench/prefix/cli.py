"""`chairlift bench prefix`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, show_table, watch
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, refuse_given

if TYPE_CHECKING:
    from chairlift.lab.bench.prefix.run import PrefixPoint

_CHAT, _RAG, _AGENTS = "Chat", "RAG", "Agents"


@bench(
    "prefix",
    "chairlift bench prefix",
    "chairlift bench prefix --scenarios agents --tools 1000 -q",
)
def bench_prefix(
    context: typer.Context,
    engine: EngineOptions,
    report: ReportOptions,
    scenarios: Annotated[str, typer.Option(help="What to measure.")] = "chat,rag,agents",
    answer: Annotated[int, typer.Option(help="Tokens generated each time.")] = 16,
    message: Annotated[int, typer.Option(help="Tokens of a message, a question, a tool's result.")] = 24,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    users: Annotated[int, typer.Option(help="How many, each with an own conversation.", rich_help_panel=_CHAT)] = 8,
    turns: Annotated[int, typer.Option(help="Messages of each.", rich_help_panel=_CHAT)] = 4,
    system: Annotated[int, typer.Option(help="Tokens of the prompt they share.", rich_help_panel=_CHAT)] = 48,
    documents: Annotated[int, typer.Option(help="How many.", rich_help_panel=_RAG)] = 4,
    document: Annotated[int, typer.Option(help="Tokens of each.", rich_help_panel=_RAG)] = 256,
    questions: Annotated[int, typer.Option(help="Each about one of them.", rich_help_panel=_RAG)] = 16,
    agents: Annotated[int, typer.Option(help="How many.", rich_help_panel=_AGENTS)] = 8,
    tools: Annotated[
        int, typer.Option(help="Tokens that describe the tools they share.", rich_help_panel=_AGENTS)
    ] = 384,
    steps: Annotated[int, typer.Option(help="Calls of each, one after the other.", rich_help_panel=_AGENTS)] = 3,
) -> None:
    """Prefix caching on traffic that repeats itself: multi-turn chat, shared documents, repeated tool descriptions.

    Everybody starts at once and goes on as soon as an answer is there. The KV
    cache holds half of what all of them would take together without sharing.
    """
    from chairlift.lab.bench.prefix.plot import plot_prefix
    from chairlift.lab.bench.prefix.run import PrefixSettings, compare_prefix_caching, parse_scenarios
    from chairlift.lab.common.engines import EngineMaker

    chosen_here = ("kv_memory", "memory_share", "max_batch_requests", "prefix_caching")
    refuse_given(context, chosen_here, "this bench chooses it")
    settings = PrefixSettings(
        users=users,
        turns=turns,
        system=system,
        message=message,
        documents=documents,
        document=document,
        questions=questions,
        agents=agents,
        tools=tools,
        steps=steps,
        answer=answer,
        seed=seed,
    )
    chosen = parse_scenarios(scenarios)
    report.check()
    show_log(quiet=True)
    with watch(enabled=not engine.quiet) as note:
        note(f"loading {engine.model}")
        maker = EngineMaker.load(engine.model, engine.config(), progress=not engine.quiet)
        points = compare_prefix_caching(maker, settings, scenarios=chosen, note=note)
    show_prefix(points)
    asked = maker.settings() | asdict(settings) | {"scenarios": chosen}
    report.write("prefix", asked, [p.row() for p in points], lambda path, here: plot_prefix(path, points, here))


def show_prefix(points: Sequence[PrefixPoint]) -> None:
    rows = [point.row() for point in points]
    show_table(
        "Prefix caching",
        ["", "Caching", "Hit rate", "TTFT\np50 ms", "TTFT\np95 ms", "Batch\nmean", "Batch\nmost", "Output\ntokens/s"],
        (
            [
                row["scenario"],
                "on" if row["prefix_caching"] else "off",
                f"{row['hit_rate']:.0%}",
                f"{row['ttft_p50_ms']:,.0f}",
                f"{row['ttft_p95_ms']:,.0f}",
                f"{row['mean_batch_requests']:.1f}",
                f"{row['peak_batch_requests']}",
                f"{row['output_tokens_per_s']:,.1f}",
            ]
            for row in rows
        ),
        "Hit rate: share of the prompt tokens found in the cache. Batch: requests in a step",
    )
