"""The speed of a model of a given shape, with random weights: single requests, batches, load and prompts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options import option_of
from chairlift.progress import Note
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.model_shapes import SHAPES
from chairlift_lab.common.shape_run import Cases, ShapeRun, run_shape
from chairlift_lab.peers.shape_peer import ShapeComparison, ShapePeer
from chairlift_lab.report.options import ReportOptions
from chairlift_lab.report.plots import Plot, picture


def shape_panels(rows: Sequence[Mapping[str, Any]], peer: str | None) -> list[Plot]:
    """The share of the floor, the time of a step, and beside a peer the multiple of its speed; `peer` is its title."""
    share = "Share of the floor reached, %"
    steps = {
        "measured": lambda row: 1e3 * row["seconds"] / row["steps"],
        "floor": lambda row: 1e3 * row["floor_seconds"] / row["steps"],
    }
    panels: list[Plot] = [
        Plot(
            title=share, rows=rows, x="name", y="share_of_floor", factor=100, y_label="%", limits=(0, 100), rotation=30
        ),
        Plot(title="Milliseconds per step", rows=rows, x="name", y=steps, log="y", rotation=30),
    ]
    if peer is not None:
        times = f"Tokens/s, as a multiple of {peer}'s"
        panels.append(Plot(title=times, rows=rows, x="name", y="times_peer", level=1, form="%.2f", rotation=30))
    return panels


_peer_option = partial(typer.Option, rich_help_panel="Another engine")
CASE = Column("Case", "name")
TOKENS = Column("Tokens/s", "tokens_per_second", ",.0f")
COLUMNS = (
    Column("Seconds", "seconds", ".3f"),
    Column("Floor s", "floor_seconds", ".3f"),
    Column("Of floor", "share_of_floor", ".0%"),
    Column("Steps", "steps", ","),
    Column("ms/step", lambda row: 1e3 * row["seconds"] / row["steps"], ".2f"),
    Column("Host busy", lambda row: row["host_seconds"] / row["seconds"], ".0%"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeEngineOptions:
    """The engine's options that change the speed of a shape."""

    device: str = option_of(EngineConfig, "device")
    dtype: str = option_of(EngineConfig, "dtype")
    quantization: str = option_of(EngineConfig, "quantization")
    quantize_head: bool = option_of(EngineConfig, "quantize_head")
    kv_dtype: str = option_of(EngineConfig, "kv_dtype")
    model_impl: str = option_of(EngineConfig, "model_impl")
    cuda_graphs: bool = option_of(EngineConfig, "cuda_graphs")
    batch_invariant: bool = option_of(EngineConfig, "batch_invariant")


@bench(
    "shapes",
    "chairlift bench shapes qwen3-0.6b",
    "chairlift bench shapes llama3-8b --cases decode-1,load-256 --json result.json",
    "chairlift bench shapes path/to/config.json --device cpu --cases decode-2 --scale 16",
    "chairlift bench shapes granite3-2b --device cpu --layers 8 --cases decode-1 --model-impl transformers",
    "chairlift bench shapes qwen3-0.6b --peer vllm --peer-python vllm/bin/python",
    report=ReportOptions,
)
def bench_shapes(
    context: typer.Context,
    report: ReportOptions,
    note: Note,
    chosen: ShapeEngineOptions,
    shape: Annotated[str, typer.Argument(help=f"{', '.join(SHAPES)}, or the path of a config.json.")] = "qwen3-0.6b",
    cases: Annotated[
        str, typer.Option(help="decode-N, load-N, load-N-SEED and prefill-N, separated by commas.")
    ] = "decode-1,decode-8,decode-32,decode-128,load-256,prefill-64",
    seats: Annotated[int, typer.Option(help="Requests per step.")] = 256,
    layers: Annotated[
        int | None, typer.Option(help="Only the first layers, for models that are too large.", show_default="all")
    ] = None,
    scale: Annotated[int, typer.Option(help="Divide all lengths by this, for slow machines.")] = 1,
    peer: Annotated[
        str | None,
        _peer_option(
            help="Another engine for the same cases on the same device, after ours: vllm.", show_default="none"
        ),
    ] = None,
    peer_python: Annotated[
        Path | None,
        _peer_option(metavar="PYTHON", help="The Python that has its package.", show_default="this one"),
    ] = None,
    peer_timeout: Annotated[float, _peer_option(help="Seconds for all of its cases, loading included.")] = 1800.0,
) -> BenchResult:
    """The speed of a model of a given shape, next to the least time the device needs for it.

    Weights are random: speed depends on shapes, not on values, so nothing is
    downloaded. The floor counts every weight once per step (of a mixture, the
    experts that its tokens use on average), every cached key and value once per
    token that reads it, and the arithmetic of the prompts, over the bandwidth and
    the arithmetic measured on this device in the same run.

    With --peer another engine gets the same requests afterwards, in the same
    number format. Each engine has a process of its own, so that the memory of the
    first is free for the second.
    """
    from chairlift.engine.settings import for_throughput

    if scale < 1:
        raise InvalidParameter("scale", f"must be at least 1, got {scale}")
    options = asdict(chosen)
    if peer is not None:
        options["quantization"] = _number_format(shape, chosen.quantization)
    config = EngineConfig(
        **options,
        load_format="dummy",
        max_model_len=max(32, 4096 // scale),
        max_batch_requests=seats,
        max_batch_tokens=None if seats <= 256 else max(16384, seats),
    )
    config = for_throughput(config)
    names = [name.strip() for name in cases.split(",")]
    asked = {"shape": shape, "cases": names, "seats": seats, "scale": scale, "layers": layers} | options
    del asked["cuda_graphs"]
    asked["quantization"] = config.quantization
    other, work = _peer(context, peer, peer_python, peer_timeout), Cases(shape, config, names, scale, layers)
    if other is None:
        return _result(asked, run_shape(work, note), None)
    compared = other.compare(work, note, keep=lambda half: _result(asked, half.own, half).finish("shapes", report))
    result = _result(asked, compared.own, compared)
    if compared.failure is not None:
        result.finish("shapes", report)
        if compared.failure.output:
            Console(file=sys.stderr).print(compared.failure.output, style="dim", highlight=False, markup=False)
        raise ChairliftError(f"{compared.peer.title} {compared.failure}")
    return result


def _peer(context: typer.Context, name: str | None, python: Path | None, timeout: float) -> ShapePeer | None:
    if name is None:
        refuse_given(context, ("peer_python", "peer_timeout"), "has no effect without --peer")
        return None
    # Not resolved: a virtual environment's python is a link that leads out of it.
    path = Path(sys.executable) if python is None else python.expanduser().absolute()
    return ShapePeer(name, path, timeout)


def _result(asked: dict[str, Any], run: ShapeRun, compared: ShapeComparison | None) -> BenchResult:
    settings = asked | {
        "ready_seconds": run.ready_seconds,
        "bytes_per_second": run.ceilings.bytes_per_second,
        "flops_per_second": run.ceilings.flops_per_second,
    }
    shape, rows, peer, columns = asked["shape"], run.rows, None, [CASE, TOKENS]
    title = f"{shape}, random weights: first token after {run.ready_seconds:.1f} s"
    if compared is not None:
        settings, rows = settings | compared.settings(), compared.rows()
    if compared is not None and compared.theirs is not None:
        name = compared.peer.title
        peer = name if compared.failure is None else None
        title = (
            f"{shape}, random weights: first token {compared.own_start_seconds:.1f} s after the start of the process, "
            f"{name} {compared.version}: {compared.theirs['start_seconds']:.1f} s"
        )
        columns += [
            Column(f"{name} tokens/s", lambda row: row.get("peer_tokens_per_second"), ",.0f", missing=""),
            Column(f"Times {name}", lambda row: row.get("times_peer"), ".2f", unit="x", missing=""),
        ]
    caption = (
        f"Ceilings here: {run.ceilings.bytes_per_second / 1e9:,.0f} GB/s, "
        f"{run.ceilings.flops_per_second / 1e12:,.1f} TFLOP/s"
    )
    table = Table(title, [*columns, *COLUMNS], rows, caption)
    return BenchResult(settings, rows, [table], picture(shape, shape_panels(rows, peer)))


def _number_format(shape: str, asked: str) -> str:
    """The format of weights beside a peer: that of the shape, which both engines read from its config."""
    if asked != "auto":
        return asked
    return "checkpoint" if "quantization_config" in SHAPES.get(shape, {}) else "none"
