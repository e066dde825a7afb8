"""`chairlift bench shapes`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.model_shapes import SHAPES
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from chairlift_lab.bench.shapes.peer import ShapeComparison, ShapePeer
    from chairlift_lab.bench.shapes.run import ShapeRun

_PEER = "Another engine"
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
    shape: Annotated[str, typer.Argument(help=f"{', '.join(SHAPES)}, or the path of a config.json.")] = "qwen3-0.6b",
    cases: Annotated[
        str, typer.Option(help="decode-N, load-N, load-N-SEED and prefill-N, separated by commas.")
    ] = "decode-1,decode-8,decode-32,decode-128,load-256,prefill-64",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="auto, none, int8 (CPU), fp8 or int4 (GPU).")] = "auto",
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="Store the head in the format of --quantization, too.")
    ] = False,
    kv_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, int8 (CPU) or fp8 (GPU).")] = "auto",
    seats: Annotated[int, typer.Option(help="Requests per step.")] = 256,
    model_impl: Annotated[
        str, typer.Option(help="auto, native, or transformers: its code instead of ours, for comparison.")
    ] = "auto",
    layers: Annotated[
        int | None, typer.Option(help="Only the first layers, for models that are too large.", show_default="all")
    ] = None,
    scale: Annotated[int, typer.Option(help="Divide all lengths by this, for slow machines.")] = 1,
    cuda_graphs: Annotated[bool, typer.Option(help="On a GPU: capture steps and replay them.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Measure what bit-identical answers cost.")
    ] = False,
    peer: Annotated[
        str | None,
        typer.Option(
            help="Another engine for the same cases on the same device, after ours: vllm.",
            rich_help_panel=_PEER,
            show_default="none",
        ),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON", help="The Python that has its package.", rich_help_panel=_PEER, show_default="this one"
        ),
    ] = None,
    peer_timeout: Annotated[
        float, typer.Option(help="Seconds for all of its cases, loading included.", rich_help_panel=_PEER)
    ] = 1800.0,
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
    from chairlift.config import EngineConfig
    from chairlift.engine.settings import for_throughput
    from chairlift_lab.bench.shapes.run import run_shape

    if scale < 1:
        raise InvalidParameter("scale", f"must be at least 1, got {scale}")
    config = EngineConfig(
        device=device,
        dtype=dtype,
        quantization=_number_format(shape, quantization) if peer is not None else quantization,
        quantize_head=quantize_head,
        kv_dtype=kv_dtype,
        load_format="dummy",
        model_impl=model_impl,
        max_model_len=max(32, 4096 // scale),
        max_batch_requests=seats,
        max_batch_tokens=None if seats <= 256 else max(16384, seats),
        cuda_graphs=cuda_graphs,
        batch_invariant=batch_invariant,
    )
    config = for_throughput(config)
    names = [name.strip() for name in cases.split(",")]
    asked = {"shape": shape, "cases": names, "device": device, "dtype": dtype, "seats": seats, "scale": scale}
    asked |= {"batch_invariant": batch_invariant, "quantization": config.quantization, "kv_dtype": kv_dtype}
    asked |= {"quantize_head": quantize_head, "model_impl": model_impl, "layers": layers}
    other = _peer(context, peer, peer_python, peer_timeout)
    if other is None:
        return _result(asked, run_shape(shape, config, names, note, scale=scale, layers=layers), None)
    compared = other.compare(
        *(shape, config, names, note),
        scale=scale,
        layers=layers,
        keep=lambda half: _result(asked, half.own, half).finish("shapes", report),
    )
    result = _result(asked, compared.own, compared)
    if compared.failure is not None:
        result.finish("shapes", report)
        if compared.failure.output:
            Console(file=sys.stderr).print(compared.failure.output, style="dim", highlight=False, markup=False)
        raise ChairliftError(f"{compared.peer.title} {compared.failure}")
    return result


def _peer(context: typer.Context, name: str | None, python: Path | None, timeout: float) -> ShapePeer | None:
    from chairlift_lab.bench.shapes.peer import ShapePeer

    if name is None:
        refuse_given(context, ("peer_python", "peer_timeout"), "has no effect without --peer")
        return None
    # Not resolved: a virtual environment's python is a link that leads out of it.
    path = Path(sys.executable) if python is None else python.expanduser().absolute()
    return ShapePeer(name, path, timeout)


def _result(asked: dict[str, Any], run: ShapeRun, compared: ShapeComparison | None) -> BenchResult:
    from chairlift_lab.bench.shapes.plot import plot_shapes

    settings = asked | {
        "ready_seconds": run.ready_seconds,
        "bytes_per_second": run.ceilings.bytes_per_second,
        "flops_per_second": run.ceilings.flops_per_second,
    }
    settings |= {} if compared is None else compared.settings()
    rows = [result.row() for result in run.results] if compared is None else compared.rows()
    times = None if compared is None else compared.times()
    return BenchResult(
        settings,
        rows,
        [_table(asked["shape"], run, rows, compared)],
        lambda path, footnote: plot_shapes(path, asked["shape"], run.results, footnote, times),
    )


def _table(shape: str, run: ShapeRun, rows: list[dict[str, Any]], compared: ShapeComparison | None) -> Table:
    title, columns = f"{shape}, random weights: first token after {run.ready_seconds:.1f} s", [CASE, TOKENS]
    if compared is not None and compared.theirs is not None:
        name = compared.peer.title
        title = (
            f"{shape}, random weights: first token {compared.own_start_seconds:.1f} s after the start of the process, "
            f"{name} {compared.version}: {compared.theirs.start_seconds:.1f} s"
        )
        columns += [
            Column(f"{name} tokens/s", lambda row: row.get("peer_tokens_per_second"), ",.0f", missing=""),
            Column(f"Times {name}", lambda row: row.get("times_peer"), ".2f", unit="x", missing=""),
        ]
    caption = (
        f"Ceilings here: {run.ceilings.bytes_per_second / 1e9:,.0f} GB/s, "
        f"{run.ceilings.flops_per_second / 1e12:,.1f} TFLOP/s"
    )
    return Table(title, [*columns, *COLUMNS], rows, caption)


def _number_format(shape: str, asked: str) -> str:
    """The format of weights beside a peer: that of the shape, which both engines read from its config."""
    from chairlift_lab.common.model_shapes import SHAPES

    if asked != "auto":
        return asked
    return "checkpoint" if "quantization_config" in SHAPES.get(shape, {}) else "none"
