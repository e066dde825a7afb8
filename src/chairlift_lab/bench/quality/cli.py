"""`chairlift bench quality`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.byte_sizes import format_bytes
from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.options import ReportOptions

LARGEST_LOSS = 0.02  # of perplexity, for an option that is the default
COLUMNS = (
    Column("", "name"),
    Column("Perplexity", "perplexity", ".3f"),
    Column("Change", "perplexity_change", "+.2%"),
    Column("±", "standard_error", ".1%"),
    Column("Same\ntop token", "greedy_agreement", ".1%"),
    Column("Weights", lambda row: format_bytes(row["weight_bytes"])),
    Column("KV bytes\nper token", "kv_bytes_per_token", ","),
    Column(f"Within {LARGEST_LOSS:.0%}", lambda row: row["perplexity_change"] <= LARGEST_LOSS),
)


@bench(
    "quality",
    "chairlift bench quality --json quality.json --plot quality.png",
    "chairlift bench quality --model path/to/model --modes 'int8, KV bfloat16'",
    "chairlift bench quality --block-types all",
    "chairlift bench quality --text wiki.test.raw --device cuda",
    report=ReportOptions,
)
def bench_quality(
    note: Note,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to measure.")] = DEFAULT_MODEL,
    modes: Annotated[
        str | None, typer.Option(help="Modes to compare with float32, separated by ;.", show_default="all")
    ] = None,
    block_types: Annotated[
        str | None,
        typer.Option(
            help="Instead, round the matrices of a GGUF model to these types of blocks (all, or Q4_0,Q4_K,…), and "
            "compare computing with the blocks with their dequantized weights in float32."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file to score instead, in pieces of 1,024 tokens.", show_default="fixed texts"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> BenchResult:
    """The cost of 8-bit weights and of a smaller KV cache in perplexity, on fixed texts.

    Perplexity against float32 with its standard error (two thirds of repeated
    measurements are within it), and how often the likeliest next token is the
    same. An option that costs more than 2% of perplexity must not be a default.
    """
    from chairlift_lab.bench.quality.plot import plot_quality
    from chairlift_lab.bench.quality.run import (
        measure_block_types,
        measure_quality,
        modes_on,
        parse_modes,
        text_to_score,
    )
    from chairlift_lab.bench.quality.texts import TEXTS

    texts = TEXTS if text is None else (text_to_score(text),)
    scored = {"text": None if text is None else text.name}
    if block_types is not None:
        if modes is not None:
            raise InvalidParameter("block_types", "was given together with modes; give one")
        found = measure_block_types(model, block_types, note, texts=texts)
        rows = [quality.row() for quality in found]
        settings = {"model": model, "block_types": [quality.mode for quality in found], "device": "cpu", **scored}
        return BenchResult(settings, rows, [quality_table(f"{model} in blocks", rows)])
    chosen = parse_modes(modes, device) if modes is not None else list(modes_on(device))
    found = measure_quality(model, chosen, note, texts=texts, device=device)
    rows = [quality.row() for quality in found]
    return BenchResult(
        {"model": model, "modes": chosen, "device": device, **scored},
        rows,
        [quality_table(model, rows)],
        lambda path, footnote: plot_quality(path, found, footnote),
    )


def quality_table(model: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    caption = "Perplexity: how many tokens the model hesitates between on average; less is better"
    return Table(f"Quality of {model}", COLUMNS, rows, caption)
