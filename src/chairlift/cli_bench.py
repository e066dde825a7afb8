"""`chairlift bench`: measure."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chairlift.bench.measure import Advance
from chairlift.bench.report import check_writable, machine, machine_line, write_report
from chairlift.bench.throughput import ENGINES, Comparison, parse_engines
from chairlift.bench.workload import LengthRange, Workload, load_workload, make_workload
from chairlift.cli_bench_attention import bench_attention
from chairlift.cli_bench_chunking import bench_chunking
from chairlift.cli_bench_claims import bench_claims
from chairlift.cli_bench_dashboard import bench_dashboard
from chairlift.cli_bench_policies import bench_policies
from chairlift.cli_bench_prefix import bench_prefix
from chairlift.cli_bench_profile import bench_profile
from chairlift.cli_bench_quality import bench_quality
from chairlift.cli_bench_serve import bench_serve
from chairlift.cli_bench_shapes import bench_shapes
from chairlift.cli_bench_speculation import bench_speculation
from chairlift.cli_console import show_log
from chairlift.cli_options import EngineOptions, examples, refuse_given, with_option_groups
from chairlift.errors import InvalidParameter

bench_app = typer.Typer(
    help="Measure the engine, alone and against others.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples("chairlift bench throughput", "chairlift bench throughput --help"),
)

_WORKLOAD = "Workload"


@bench_app.command(
    epilog=examples(
        "chairlift bench throughput",
        "chairlift bench throughput --requests 16 --prompt-len 128 --output-len 32:64 --engines chairlift",
        "chairlift bench throughput --workload workload.json --concurrency 32 --json result.json",
    )
)
@with_option_groups
def throughput(
    context: typer.Context,
    engine: EngineOptions,
    requests: Annotated[int, typer.Option(help="How many requests.", rich_help_panel=_WORKLOAD)] = 64,
    prompt_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Prompt tokens, spread log-uniformly.", rich_help_panel=_WORKLOAD),
    ] = "16:512",
    output_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="Output tokens, spread log-uniformly.", rich_help_panel=_WORKLOAD),
    ] = "16:256",
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_WORKLOAD)] = 0,
    workload: Annotated[
        Path | None,
        typer.Option(
            help='Take the requests from JSON instead: {"requests": [{"prompt_ids": [1, 2], "n_out": 3}, …]}.',
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests per step, in every engine that batches.",
            rich_help_panel=_WORKLOAD,
            show_default="from the machine",
        ),
    ] = None,
    engines: Annotated[str, typer.Option(help="What to compare, in this order.")] = ",".join(ENGINES),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report there (keys: docs/bench-json.md)."),
    ] = None,
) -> None:
    """Output tokens per second of this engine, of itself one request at a time, and of transformers.

    All requests are submitted at once and generate greedily until their
    length is reached. The engines run one after the other in this process,
    with as many threads each.
    """
    options = _with_concurrency(engine, concurrency)
    comparison = Comparison(engine.model, parse_engines(engines), options, progress=not engine.quiet)
    lengths = {"prompt_len": LengthRange.parse("prompt_len", prompt_len)}
    lengths["output_len"] = LengthRange.parse("output_len", output_len)
    if json_file is not None:
        check_writable(json_file)
    show_log(quiet=engine.quiet)
    settings = comparison.settings()
    if workload is not None:
        problem = "the requests come from the workload file; give only one of them"
        refuse_given(context, ("requests", "prompt_len", "output_len", "seed"), problem)
        work = load_workload(workload)
        source: dict[str, Any] = {"workload": workload.name}
    else:
        work = make_workload(comparison.vocabulary(), requests=requests, seed=seed, **lengths)
        source = {"workload": None, "seed": seed} | {name: str(length) for name, length in lengths.items()}
    settings |= {"requests": len(work.requests)} | source
    rows = comparison.run(work, lambda name: _watch(name, work, enabled=not engine.quiet))
    Console().print(_table(rows))
    Console().print(machine_line(machine()), style="dim", highlight=False)
    if json_file is not None:
        write_report(json_file, "throughput", settings, rows)


def _with_concurrency(engine: EngineOptions, concurrency: int | None) -> dict[str, Any]:
    options = engine.config()
    if concurrency is not None:
        if options["max_batch_requests"] is not None:
            raise InvalidParameter("concurrency", "means max_batch_requests for all engines; give only one of them")
        if concurrency < 1:
            raise InvalidParameter("concurrency", f"must be at least 1, got {concurrency}")
        options["max_batch_requests"] = concurrency
    return options


@contextmanager
def _watch(name: str, work: Workload, *, enabled: bool) -> Iterator[Advance]:
    """A bar that fills with the tokens of one engine."""
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    shown = enabled and sys.stderr.isatty()
    console = Console(file=sys.stderr)  # this very stream: loading transformers exchanges sys.stderr for a while
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(name, total=work.output_tokens, speed="loading")
        begun = 0.0

        def advance(tokens: int) -> None:
            nonlocal begun
            begun = begun if tokens else time.perf_counter()
            speed = tokens / max(time.perf_counter() - begun, 1e-9)
            progress.update(task, completed=tokens, speed=f"{speed:,.0f} tokens/s")

        yield advance


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first = rows[0]
    table = Table(title="Throughput", title_justify="left", box=SIMPLE_HEAD, caption_justify="left")
    table.caption = "Overhead: scheduling and building batches, as a share of the steps"
    table.add_column("\nEngine", no_wrap=True)
    figures = ("Output\ntokens/s", "TTFT\np50 s", "ITL\nmean ms", "Mean\nbatch", "Over-\nhead")
    for heading in (*figures, f"{first['name']}\nis"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ratio = first["speedup_vs"].get(row["name"])
        table.add_row(
            row["name"],
            f"{row['output_tokens_per_s']:,.1f}",
            f"{row['ttft_p50_ms'] / 1e3:.2f}",
            _or_dash(row["itl_mean_ms"], ".1f"),
            _or_dash(row["mean_batch_requests"], ".1f"),
            _or_dash(row["scheduler_share"], ".1%"),
            "" if ratio is None else f"{ratio:.2f}x",
        )
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


bench_app.command(
    "attention",
    epilog=examples(
        "chairlift bench attention",
        "chairlift bench attention --experiments tiling --sizes 1024,4096 --plot tiling.png",
    ),
)(bench_attention)
bench_app.command(
    "prefix", epilog=examples("chairlift bench prefix", "chairlift bench prefix --scenarios agents --tools 1000 -q")
)(bench_prefix)
bench_app.command(
    "profile",
    epilog=examples(
        "chairlift bench profile --out profile.json",
        "chairlift bench profile --model path/to/model --out profile.json",
        "chairlift simulate --profile profile.json --rate 1",
    ),
)(bench_profile)
bench_app.command(
    "shapes",
    epilog=examples(
        "chairlift bench shapes qwen3-0.6b",
        "chairlift bench shapes llama3-8b --cases decode-1,load-256 --json result.json",
        "chairlift bench shapes path/to/config.json --device cpu --cases decode-2 --scale 16",
    ),
)(bench_shapes)
bench_app.command(
    "serve",
    epilog=examples(
        "chairlift bench serve",
        "chairlift bench serve --compare-offline --repeat 3 --json result.json --plot result.png",
        "chairlift bench serve --rate 2 --arrivals bursty --max-ttft-ms 2000 --max-tpot-ms 150",
        "chairlift bench serve --url http://localhost:8000 --concurrency 32 --prompt-len 256 --output-len 128",
        "chairlift bench serve --trace azure_2023_conversation.csv --trace-speed 0.2 --duration 120",
    ),
)(bench_serve)
bench_app.command(
    "policies",
    epilog=examples(
        "chairlift bench policies",
        "chairlift bench policies --strategies continuous,continuous/padded,static/padded --arrivals at-once",
    ),
)(bench_policies)
bench_app.command(
    "claims",
    epilog=examples("chairlift bench claims", "chairlift bench claims --claims tiling,cache --plot claims.png"),
)(bench_claims)
bench_app.command(
    "chunking",
    epilog=examples("chairlift bench chunking", "chairlift bench chunking --targets-ms 100,200 --plot chunking.png"),
)(bench_chunking)
bench_app.command(
    "speculation",
    epilog=examples(
        "chairlift bench speculation",
        "chairlift bench speculation --proposers ngram,draft:smollm2-135m --scenarios chat --plot speed.png",
    ),
)(bench_speculation)
bench_app.command(
    "dashboard",
    epilog=examples(
        "chairlift bench dashboard --json result.json",
        "chairlift bench dashboard --streams 64 --pairs 2 --seconds 5 --frames",
    ),
)(bench_dashboard)
bench_app.command(
    name="quality",
    epilog=examples(
        "chairlift bench quality --json quality.json --plot quality.png",
        "chairlift bench quality --model path/to/model --modes 'int8, KV bfloat16'",
    ),
)(bench_quality)
