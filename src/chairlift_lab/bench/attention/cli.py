"""`chairlift bench attention`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.attention.options import AttentionOptions, AttentionSettings
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.report.lists import parse_names
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chairlift_lab.bench.attention.run import AttentionResults

TILING = (
    Column("Tokens", "tokens", ","),
    Column("Tiled\nms", "tiled_seconds", ".1f", factor=1e3),
    Column("Whole\nms", "full_seconds", ".1f", factor=1e3, missing="too large"),
    Column("Whole\nis", lambda row: _ratio(row["full_seconds"], row["tiled_seconds"]), ".1f", unit="x", missing=""),
    Column("Tiled\nMiB", "tiled_bytes", ",.1f", factor=2**-20),
    Column("Whole\nMiB", "full_bytes", ",.1f", factor=2**-20),
)
SHARING = (
    Column("", lambda row: row["name"].removeprefix("sharing: ")),
    Column("KV heads", "kv_heads"),
    Column("Bytes per token\nand layer", "bytes_per_token", ","),
    Column("Decode\nms", "decode_seconds", ".2f", factor=1e3),
    Column("Sequences\nin 1 GiB", "largest_batch", ","),
)
CACHE = (
    Column("Tokens", "tokens", ","),
    Column("Cached\ns", "cached_seconds", ".3f"),
    Column("Recomputed\ns", "recompute_seconds", ".3f"),
    Column("Recomputed\nis", lambda row: _ratio(row["recompute_seconds"], row["cached_seconds"]), ".1f", unit="x"),
    Column("Computed,\ncached", "cached_tokens", ","),
    Column("Computed,\nrecomputed", "recompute_tokens", ","),
)


@bench(
    "attention",
    "chairlift bench attention",
    "chairlift bench attention --experiments tiling --sizes 1024,4096 --plot tiling.png",
    report=ReportOptions,
)
def bench_attention(
    options: AttentionOptions,
    note: Note,
    experiments: Annotated[str, typer.Option(help="What to measure.")] = "modes,tiling,sharing,cache",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> BenchResult:
    """Attention backends, tiling, shared KV heads and the KV cache, each against its alternative.

    modes: one call per request, one padded call, one ragged call.
    tiling: a FlashAttention kernel and the full score matrix.
    sharing: MHA, GQA and MQA.
    cache: keys and values cached, or recomputed for every token.
    """
    from chairlift.config import EngineConfig
    from chairlift.engine.settings import resolve_machine
    from chairlift_lab.bench.attention.plot import plot_attention
    from chairlift_lab.bench.attention.run import EXPERIMENTS, run_attention

    settings = AttentionSettings(**asdict(options))
    chosen = parse_names("experiments", experiments, EXPERIMENTS)
    chosen_machine = resolve_machine(EngineConfig(device=device, dtype=dtype))
    on, precision = chosen_machine.device, chosen_machine.dtype
    results = run_attention(settings, on, precision, experiments=chosen, note=note)
    machine = {"device": str(on), "dtype": str(precision).removeprefix("torch.")}
    return BenchResult(
        asdict(settings) | {"experiments": chosen} | machine,
        results.rows(),
        list(attention_tables(results)),
        lambda path, footnote: plot_attention(path, results, footnote),
    )


def attention_tables(results: AttentionResults) -> Iterator[Table]:
    """A table for each experiment that was run."""
    rows = results.rows()

    def of(experiment: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["experiment"] == experiment]

    if results.modes:
        yield _modes_table(of("modes"), list(results.modes[0].seconds))
    if results.tiling:
        caption = "Whole: with the full score matrix. MiB: peak memory besides queries, keys and values"
        yield Table("Tiling: causal attention over one prompt", TILING, of("tiling"), caption)
    if results.sharing:
        yield Table("Sharing: heads with the same keys and values", SHARING, of("sharing"))
    if results.cache:
        caption = "A small random model. Computed: tokens that went through the model"
        yield Table("Cache: generating with and without a KV cache", CACHE, of("cache"), caption)


def _modes_table(rows: list[dict[str, Any]], modes: list[str]) -> Table:
    def cell(row: dict[str, Any], mode: str) -> str:
        seconds, first = row["seconds"][mode], row["seconds"][modes[0]]
        return f"{seconds * 1e3:.3f}" + ("" if mode == modes[0] else f" {seconds / first:5.1f}x")

    columns = [
        Column("Batch", "kind"),
        Column("Size", "batch"),
        Column("Spread", "variation", "g"),
        *(Column(f"{mode}\nms", lambda row, mode=mode: cell(row, mode)) for mode in modes),  # type: ignore[misc]
        Column("Padding", lambda row: row["padding"] / (row["tokens"] + row["padding"]), ".0%"),
    ]
    caption = (
        "Spread: standard deviation / mean of the lengths. Padding: share of the tokens that the padded mode "
        "computes in vain, in this layer and in all others"
    )
    return Table("Modes: the attention of one layer", columns, rows, caption)


def _ratio(value: float | None, of: float) -> float | None:
    return None if value is None else value / of
