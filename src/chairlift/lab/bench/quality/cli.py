"""`chairlift bench quality`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, show_table, watch
from chairlift.loading.store import DEFAULT_MODEL
from chairlift.terminal.console import show_log

if TYPE_CHECKING:
    from chairlift.lab.bench.quality.run import Quality


@bench(
    "quality",
    "chairlift bench quality --json quality.json --plot quality.png",
    "chairlift bench quality --model path/to/model --modes 'int8, KV bfloat16'",
)
def bench_quality(
    report: ReportOptions,
    model: Annotated[str, typer.Option("--model", "-m", help="Which model to judge.")] = DEFAULT_MODEL,
    modes: Annotated[
        str | None, typer.Option(help="What to compare with float32, with ; between them.", show_default="all of them")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """What 8-bit weights and a smaller KV cache cost, on a fixed set of texts.

    Perplexity against float32, and how often the likeliest next token is the same. An option that costs more than 2%
    of perplexity must not be a default.
    """
    from chairlift.lab.bench.quality.plot import plot_quality
    from chairlift.lab.bench.quality.run import measure_quality, modes_on, parse_modes

    chosen = parse_modes(modes, device) if modes is not None else list(modes_on(device))
    report.check()
    show_log(quiet=True)
    with watch(enabled=not quiet) as note:
        found = measure_quality(model, chosen, note, device=device)
    show_quality(model, found)
    rows = [quality.row() for quality in found]
    report.write(
        "quality",
        {"model": model, "modes": chosen, "device": device},
        rows,
        lambda path, here: plot_quality(path, found, here),
    )


def show_quality(model: str, found: Sequence[Quality]) -> None:
    from chairlift.byte_sizes import format_bytes
    from chairlift.lab.bench.quality.run import LARGEST_LOSS

    show_table(
        f"Quality of {model}",
        [
            "",
            "Perplexity",
            "Change",
            "Same\nlikeliest token",
            "Weights",
            "KV bytes\nper token",
            f"Within {LARGEST_LOSS:.0%}",
        ],
        (
            [
                quality.mode,
                f"{quality.perplexity:.3f}",
                f"{quality.change:+.2%}",
                f"{quality.agreement:.1%}",
                format_bytes(quality.weight_bytes),
                f"{quality.kv_bytes_per_token:,}",
                "yes" if quality.change <= LARGEST_LOSS else "no",
            ]
            for quality in found
        ),
        "Perplexity: how many tokens the model hesitates between, on average; less is better",
    )
