"""`chairlift bench attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.lab.bench.base import bench
from chairlift.lab.common.output import ReportOptions, parse_numbers, show_table, watch

if TYPE_CHECKING:
    from chairlift.lab.bench.attention.kernels import SharingPoint, TilingPoint
    from chairlift.lab.bench.attention.kv_recompute import RecomputePoint
    from chairlift.lab.bench.attention.modes import ModesPoint
    from chairlift.lab.bench.attention.run import AttentionResults

_LAYER, _BATCH = "Layer", "Batches"


@bench(
    "attention",
    "chairlift bench attention",
    "chairlift bench attention --experiments tiling --sizes 1024,4096 --plot tiling.png",
)
def bench_attention(
    report: ReportOptions,
    experiments: Annotated[str, typer.Option(help="What to measure.")] = "modes,tiling,sharing,cache",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_LAYER)] = 9,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.", rich_help_panel=_LAYER)] = 3,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=_LAYER)] = 64,
    batches: Annotated[str, typer.Option(help="Requests in a batch.", rich_help_panel=_BATCH)] = "1,4,16,64",
    variations: Annotated[
        str,
        typer.Option(help="How much lengths in a batch vary: standard deviation / mean.", rich_help_panel=_BATCH),
    ] = "0,0.5,1",
    context: Annotated[int, typer.Option(help="Mean length of a sequence.", rich_help_panel=_BATCH)] = 512,
    prompt: Annotated[int, typer.Option(help="Prompt tokens in a mixed batch.", rich_help_panel=_BATCH)] = 256,
    sizes: Annotated[
        str, typer.Option(help="Prompt tokens, tiled and materialised.", rich_help_panel=_BATCH)
    ] = "512,1024,2048,4096,8192,16384",
    cache_sizes: Annotated[
        str, typer.Option(help="Tokens generated, with and without a KV cache.", rich_help_panel=_BATCH)
    ] = "32,64,128,256,512",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Attention in every way there is: what batching, tiles, shared heads and the KV cache are worth.

    modes: a call per request, one padded call, one ragged call. tiling: a
    FlashAttention-style kernel and the whole score matrix. sharing: MHA, GQA
    and MQA. cache: keys and values kept, or computed anew for every token.
    """
    from chairlift.config import EngineConfig
    from chairlift.engine.machine_defaults import torch_device, torch_dtype
    from chairlift.lab.bench.attention.plot import plot_attention
    from chairlift.lab.bench.attention.run import AttentionSettings, parse_experiments, run_attention

    settings = AttentionSettings(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batches=parse_numbers("batches", batches),
        variations=parse_numbers("variations", variations, float),
        context=context,
        prompt=prompt,
        tiling_sizes=parse_numbers("sizes", sizes),
        cache_sizes=parse_numbers("cache_sizes", cache_sizes),
    )
    chosen, engine = parse_experiments(experiments), EngineConfig(device=device, dtype=dtype)
    report.check()
    with watch(enabled=not quiet) as note:
        results = run_attention(settings, torch_device(engine), torch_dtype(engine), experiments=chosen, note=note)
    show_attention(results)
    asked = asdict(settings) | {"experiments": chosen, "device": str(torch_device(engine))}
    asked["dtype"] = str(torch_dtype(engine)).removeprefix("torch.")
    report.write("attention", asked, results.rows(), lambda path, here: plot_attention(path, results, here))


def show_attention(results: AttentionResults) -> None:
    if results.modes:
        _show_modes(results.modes)
    if results.tiling:
        _show_tiling(results.tiling)
    if results.sharing:
        _show_sharing(results.sharing)
    if results.cache:
        _show_cache(results.cache)


def _show_modes(points: Sequence[ModesPoint]) -> None:
    modes = list(points[0].seconds)

    def cell(point: ModesPoint, mode: str) -> str:
        seconds, first = point.seconds[mode], point.seconds[modes[0]]
        return f"{seconds * 1e3:.3f}" + ("" if mode == modes[0] else f" {seconds / first:5.1f}x")

    show_table(
        "Modes: the attention of one layer",
        ["Batch", "Size", "Spread", *(f"{mode}\nms" for mode in modes), "Padding"],
        (
            [
                point.kind,
                f"{point.batch}",
                f"{point.variation:g}",
                *(cell(point, mode) for mode in modes),
                f"{point.padding / (point.tokens + point.padding):.0%}",
            ]
            for point in points
        ),
        "Spread: standard deviation / mean of the lengths. Padding: share of the tokens that the padded mode "
        "computes for nobody, in this layer and in all others",
    )


def _show_tiling(points: Sequence[TilingPoint]) -> None:
    show_table(
        "Tiling: causal attention over one prompt",
        ["Tokens", "Tiled\nms", "Whole\nms", "Whole\nis", "Tiled\nMiB", "Whole\nMiB"],
        (
            [
                f"{point.tokens:,}",
                f"{point.tiled_seconds * 1e3:.1f}",
                "no room" if point.full_seconds is None else f"{point.full_seconds * 1e3:.1f}",
                "" if point.full_seconds is None else f"{point.full_seconds / point.tiled_seconds:.1f}x",
                _mebibytes(point.tiled_bytes),
                _mebibytes(point.full_bytes),
            ]
            for point in points
        ),
        "Whole: every score in memory. MiB: peak memory besides queries, keys and values",
    )


def _show_sharing(points: Sequence[SharingPoint]) -> None:
    show_table(
        "Sharing: heads with the same keys and values",
        ["", "KV heads", "Bytes per token\nand layer", "Decode\nms", "Sequences\nin 1 GiB"],
        (
            [
                point.name,
                f"{point.kv_heads}",
                f"{point.bytes_per_token:,}",
                f"{point.decode_seconds * 1e3:.2f}",
                f"{point.largest_batch:,}",
            ]
            for point in points
        ),
    )


def _show_cache(points: Sequence[RecomputePoint]) -> None:
    show_table(
        "Cache: generating with and without it",
        ["Tokens", "Kept\ns", "Anew\ns", "Anew\nis", "Computed\nkept", "Computed\nanew"],
        (
            [
                f"{point.tokens:,}",
                f"{point.cached_seconds:.3f}",
                f"{point.recompute_seconds:.3f}",
                f"{point.recompute_seconds / point.cached_seconds:.1f}x",
                f"{point.cached_tokens:,}",
                f"{point.recompute_tokens:,}",
            ]
            for point in points
        ),
        "A small random model. Computed: tokens that went through it",
    )


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"
