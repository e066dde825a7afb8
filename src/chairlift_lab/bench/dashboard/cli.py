"""`chairlift bench dashboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.options import ReportOptions

STEPS_IN_VIEW = 5000
COST = (
    Column("Page", "name"),
    Column("Output\ntokens/s", "output_tokens_per_s", ",.1f"),
    Column("of closed", lambda row: _ratio(row)),
    Column("Engine CPU\nms/token", "engine_cpu_ms_per_token", ".3f"),
    Column("Front end\nCPU", "front_end_cpu_share", ".1%"),
    Column("Stream\nKB/s", "stream_bytes_per_s", ",.1f", factor=1e-3),
)
FRAMES = (
    Column("", lambda found: "frames"),
    Column("Per second", "frames_per_s", ".1f"),
    Column("Slowest ms", "slowest_ms", ".0f"),
    Column("Chart, ms", "draw_ms", ".2f"),
    Column("All panels, ms", "script_ms", ".2f"),
)


@bench(
    "dashboard",
    "chairlift bench dashboard --json result.json",
    "chairlift bench dashboard --streams 64 --pairs 2 --seconds 5 --frames",
    report=ReportOptions,
)
def bench_dashboard(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    streams: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 200,
    pairs: Annotated[int, typer.Option(help="Pairs of windows with the page closed and open.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="Length of a window.", min=0.5)] = 10.0,
    prompt_len: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Prompt tokens.")] = "16:64",
    output_len: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Output tokens.")] = "64:256",
    frames: Annotated[
        bool,
        typer.Option(
            "--frames", help=f"Also measure how fast the page draws {STEPS_IN_VIEW:,} steps (chromium, selenium)."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
) -> BenchResult:
    """Throughput with and without an open dashboard, in turns, under one load.

    A server is started for it, with as many slots as there are streams unless
    --max-batch-requests says otherwise.
    """
    from chairlift_lab.bench.dashboard.page_speed import measure_frames, require_browser
    from chairlift_lab.bench.dashboard.plot import plot_cost
    from chairlift_lab.bench.dashboard.run import measure_dashboard
    from chairlift_lab.common.workload import LengthRange, draw_requests
    from chairlift_lab.load.local_server import local_model_facts

    prompts, outputs = LengthRange.parse("prompt_len", prompt_len), LengthRange.parse("output_len", output_len)
    if frames:
        require_browser()
    options = dict(engine.config())
    if not given(context, "max_batch_requests"):
        options["max_batch_requests"] = streams
        options["max_batch_tokens"] = max(options["max_batch_tokens"] or 256, streams)
    vocabulary, limit = local_model_facts(engine.model, options, progress=not engine.quiet)
    if prompts.high + outputs.high > limit:
        raise InvalidParameter("output_len", f"prompt and output together exceed the model's {limit} tokens")
    requests = draw_requests(vocabulary, prompt_len=prompts, output_len=outputs, seed=seed)
    cost = measure_dashboard(engine.model, options, requests, streams=streams, pairs=pairs, seconds=seconds, note=note)
    rows = cost.rows()
    tables = _cost_tables(rows)
    if frames:
        note("drawing the page")
        found = measure_frames(steps=STEPS_IN_VIEW, slots=64)
        rows.append({"name": "page", **found})
        tables.append(_frames_table(found))
    asked = options | {"model": engine.model, "streams": streams, "pairs": pairs, "seconds": seconds, "seed": seed}
    asked |= {"prompt_len": prompt_len, "output_len": output_len}
    return BenchResult(asked, rows, tables, lambda path, footnote: plot_cost(path, cost, footnote))


def _cost_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    caption = "of closed: mean over pairs of windows, and its standard error. Front end CPU: of one core"
    memory = [
        Column("", lambda name: name.replace("_", " ")),
        Column("After the first window", lambda name: rows[0][f"{name}_memory_first_bytes"], ",.1f", factor=1e-6),
        Column("After the last", lambda name: rows[0][f"{name}_memory_last_bytes"], ",.1f", factor=1e-6),
    ]
    grows = "The engine's grows until all of its KV cache has been written to"
    return [
        Table("The dashboard's cost", COST, list(rows), caption),
        Table("Memory, MB", memory, ("front_end", "engine"), grows),
    ]


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.1%}" + (f" ± {row['ratio_error']:.1%}" if row["ratio_error"] else "")


def _frames_table(found: Mapping[str, Any]) -> Table:
    title = f"The page with {found['steps_in_view']:,} steps of {found['seats']} slots in view"
    return Table(title, FRAMES, [found], "ms: time of the page's main thread per frame")
