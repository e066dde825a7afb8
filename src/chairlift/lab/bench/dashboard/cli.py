"""`chairlift bench dashboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, show_table, watch
from chairlift.terminal.console import show_log
from chairlift.terminal.options import EngineOptions, given

STEPS_IN_VIEW = 5000


@bench(
    "dashboard",
    "chairlift bench dashboard --json result.json",
    "chairlift bench dashboard --streams 64 --pairs 2 --seconds 5 --frames",
)
def bench_dashboard(
    context: typer.Context,
    engine: EngineOptions,
    report: ReportOptions,
    streams: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 200,
    pairs: Annotated[int, typer.Option(help="How often the page is closed and open.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="How long each time.", min=0.5)] = 10.0,
    prompt_len: Annotated[str, typer.Option(help="Tokens of a prompt, as a range.")] = "16:64",
    output_len: Annotated[str, typer.Option(help="Tokens of an answer, as a range.")] = "64:256",
    frames: Annotated[
        bool,
        typer.Option(
            "--frames", help=f"Also how fast the page draws {STEPS_IN_VIEW:,} steps (needs chromium and selenium)."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
) -> None:
    """What an open dashboard costs: throughput with and without it, in turns, under one load.

    A server is started for it, with as many seats as there are streams unless
    --max-batch-requests says otherwise.
    """
    from chairlift.lab.bench.dashboard.page_speed import measure_frames, require_browser
    from chairlift.lab.bench.dashboard.plot import plot_cost
    from chairlift.lab.bench.dashboard.run import measure_dashboard
    from chairlift.lab.bench.serve.run import local_model_facts
    from chairlift.lab.common.workload import LengthRange, draw_requests

    prompts, outputs = LengthRange.parse("prompt_len", prompt_len), LengthRange.parse("output_len", output_len)
    report.check()
    if frames:
        require_browser()
    show_log(quiet=True)
    options = dict(engine.config())
    if not given(context, "max_batch_requests"):
        options["max_batch_requests"] = streams
        options["max_batch_tokens"] = max(options["max_batch_tokens"] or 256, streams)
    vocabulary, limit = local_model_facts(engine.model, options, progress=not engine.quiet)
    if prompts.high + outputs.high > limit:
        raise InvalidParameter("output_len", f"with the prompt, it exceeds the {limit} tokens that the model takes")
    requests = draw_requests(vocabulary, prompt_len=prompts, output_len=outputs, seed=seed)
    with watch(enabled=not engine.quiet) as note:
        cost = measure_dashboard(
            engine.model, options, requests, streams=streams, pairs=pairs, seconds=seconds, note=note
        )
    rows = cost.rows()
    show_cost(rows)
    if frames:
        found = measure_frames(steps=STEPS_IN_VIEW, seats=64)
        rows.append({"name": "page", **found})
        show_frames(found)
    asked = options | {"model": engine.model, "streams": streams, "pairs": pairs, "seconds": seconds, "seed": seed}
    asked |= {"prompt_len": prompt_len, "output_len": output_len}
    report.write("dashboard", asked, rows, lambda path, here: plot_cost(path, cost, here))


def show_cost(rows: Sequence[Mapping[str, Any]]) -> None:
    show_table(
        "The dashboard's cost",
        ["Page", "Output\ntokens/s", "of closed", "Engine CPU\nms/token", "Front end\nCPU", "Stream\nKB/s"],
        (
            [
                row["name"],
                f"{row['output_tokens_per_s']:,.1f}",
                f"{row['ratio']:.1%}" + (f" ± {row['ratio_error']:.1%}" if row["ratio_error"] else ""),
                f"{row['engine_cpu_ms_per_token']:.3f}",
                f"{row['front_end_cpu_share']:.1%}",
                f"{row['stream_bytes_per_s'] / 1000:,.1f}",
            ]
            for row in rows
        ),
        "of closed: mean over pairs of windows, and its standard error. Front end CPU: of one core",
    )
    show_table(
        "Memory, MB",
        ["", "After the first window", "After the last"],
        (
            [name.replace("_", " ")]
            + [f"{rows[0][f'{name}_memory_{which}_bytes'] / 1e6:,.1f}" for which in ("first", "last")]
            for name in ("front_end", "engine")
        ),
        "The engine's grows until all of its KV cache has been written to",
    )


def show_frames(found: Mapping[str, float]) -> None:
    show_table(
        f"The page with {found['steps_in_view']:,} steps of {found['seats']} seats in view",
        ["", "Per second", "Slowest ms", "The lift, ms", "All panels, ms"],
        [
            ["pictures", f"{found['frames_per_s']:.1f}", f"{found['slowest_ms']:.0f}"]
            + [f"{found[name]:.2f}" for name in ("draw_ms", "script_ms")]
        ],
        "ms: of the page's main thread, for each picture",
    )
