"""The speed of a model of a given shape, with random weights: single requests, batches, load and prompts.

Beside a peer, our engine and then the other run the same cases, each in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.model_shapes import (
    SHAPES,
    Cases,
    ShapeCase,
    ShapeRun,
    config_file,
    make_cases,
    run_shape,
    warm_up_of,
)
from chairlift_lab.peers.peers import CHECK_SECONDS, PeerFailed, PeerProcess, run_ours
from chairlift_lab.report.options import Plot, ReportOptions, picture

SHAPE_PEERS = {"vllm": "vLLM"}  # Their titles, by name.
PROGRAM = "shapes.py"


@dataclass(frozen=True, slots=True)
class ShapePeer:
    """A peer; `python` has its package."""

    name: str
    python: Path = Path(sys.executable)
    timeout: float = 1800.0  # seconds for all cases, loading included

    def __post_init__(self) -> None:
        if self.name not in SHAPE_PEERS:
            raise InvalidParameter("peer", f"there is no {self.name!r}; choose from {', '.join(SHAPE_PEERS)}")
        if not self.python.exists():
            raise InvalidParameter("peer_python", f"there is no {str(self.python)!r}")
        if not self.timeout > 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.timeout:g}")

    @property
    def title(self) -> str:
        return SHAPE_PEERS[self.name]

    def _process(self, timeout: float, **environment: str) -> PeerProcess:
        return PeerProcess(self.python, PROGRAM, self.name, timeout, environment)

    def version(self) -> str:
        """The version of its package; raises if it is not installed."""
        try:
            answer = self._process(CHECK_SECONDS).ask("--check")
        except PeerFailed as failure:
            raise InvalidParameter("peer_python", f"{self.python}: {failure}") from None
        if "version" not in answer:
            problem = f"{self.python} has no package {answer.get('missing')}: install it there, or name the Python"
            raise InvalidParameter("peer_python", f"{problem} that has it")
        return str(answer["version"])

    def compare(
        self, cases: Cases, note: Note, keep: Callable[[ShapeComparison], None] = lambda half: None
    ) -> ShapeComparison:
        """Run our engine, then the peer. Options are checked first.

        `keep` is called with our half as soon as it is complete, since the peer takes minutes and may be interrupted.
        """
        _refuse_other_formats(cases.config, self.title)
        version = self.version()
        own, start_seconds = run_own(cases, note)
        half = ShapeComparison(self, version, own, start_seconds)
        keep(half)
        answer: dict[str, Any] = {}
        drawn = make_cases(cases.names, own.vocabulary, cases.scale)
        failure = None
        try:
            self._run(cases, drawn, note, answer)
        except PeerFailed as error:
            failure = error
        return replace(half, theirs=valid_part(answer, len(drawn)), failure=failure)

    def _run(self, cases: Cases, drawn: Sequence[ShapeCase], note: Note, answer: dict[str, Any]) -> None:
        """Run the same cases in the same number format; `answer` also has what was completed before a failure."""
        from chairlift.engine.settings import resolve_machine

        config = cases.config
        job = {
            "dtype": str(resolve_machine(config).dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "prefix_caching": config.prefix_caching,
            "quantization": "fp8" if config.quantization == "fp8" else None,  # None: what its config.json names
            "kv_dtype": "fp8" if config.kv_dtype == "fp8" else "auto",
            "cases": [asdict(case) for case in drawn],
            "warm_ups": [asdict(warm_up_of(case)) for case in drawn],
        }
        process = self._process(self.timeout, HF_HUB_OFFLINE="1", **only_this_gpu(config))
        with config_file(cases.shape, layers=cases.layers) as path, tempfile.TemporaryDirectory() as folder:
            source = Path(path).expanduser()
            shutil.copyfile(source / "config.json" if source.is_dir() else source, Path(folder) / "config.json")
            show = _noting(self.title, note)

            def progress(line: dict[str, Any]) -> None:
                answer.update(line)
                show(line)

            process.run(job | {"model": folder}, progress)
        for key in ("start_seconds", "seconds"):
            if key not in answer:
                raise PeerFailed(f"answered without {key!r}")
        if valid_part(answer, len(drawn)) is None or len(answer["seconds"]) != len(drawn):
            raise PeerFailed(f"answered {answer['seconds']} as the seconds of {len(drawn)} cases")


def valid_part(answer: Mapping[str, Any], num_cases: int) -> dict[str, Any] | None:
    """What there is of an answer, if it makes sense: the start, and the seconds of the cases that were completed."""
    seconds = answer.get("seconds", [])
    if "start_seconds" not in answer or len(seconds) > num_cases or not all(each > 0 for each in seconds):
        return None
    return {"start_seconds": answer["start_seconds"], "seconds": seconds}


@dataclass(frozen=True, slots=True)
class ShapeComparison:
    """Both runs; ours is complete even if the peer failed."""

    peer: ShapePeer
    version: str
    own: ShapeRun
    own_start_seconds: float  # Counted from the start of our process to its first token.
    theirs: Mapping[str, Any] | None = None  # the same of its process, and the seconds of each completed case
    failure: PeerFailed | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that a peer adds to the report."""
        start = None if self.theirs is None else self.theirs["start_seconds"]
        failure = None if self.failure is None else str(self.failure)
        peer = {"name": self.peer.name, "version": self.version, "start_seconds": start, "failure": failure}
        return {"start_seconds": self.own_start_seconds, "peer": peer}

    def rows(self) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self.own.rows]
        for row, seconds in zip(rows, [] if self.theirs is None else self.theirs["seconds"], strict=False):
            row["peer_seconds"] = seconds
            row["peer_tokens_per_second"] = row["output_tokens"] / seconds
            row["times_peer"] = seconds / row["seconds"]
        return rows


def run_own(cases: Cases, note: Note) -> tuple[ShapeRun, float]:
    """`run_shape` in a process of its own, and the seconds from its start to its first token."""
    job = cases._asdict() | {"config": asdict(cases.config), "names": list(cases.names)}
    answer = run_ours(job, _noting("Chairlift", note))
    run = ShapeRun(answer["rows"], Ceilings(**answer["ceilings"]), answer["ready_seconds"], answer["vocabulary"])
    return run, answer["start_seconds"]


def _noting(title: str, note: Note) -> Callable[[dict[str, Any]], None]:
    """Shows the notes of a process."""

    def progress(line: dict[str, Any]) -> None:
        if "note" in line:
            note(f"{title}: {line['note']}")

    note(f"{title}: starting")
    return progress


def _refuse_other_formats(config: EngineConfig, title: str) -> None:
    from chairlift.engine.settings import KV_DTYPES, resolve_machine

    allowed = ("none", "fp8", "checkpoint")  # the last: what the shape itself names
    if config.quantization not in allowed:
        raise InvalidParameter("quantization", f"cannot be compared: {title} has no such format; use one of {allowed}")
    if config.kv_dtype not in ("auto", "fp8") and KV_DTYPES[config.kv_dtype] != resolve_machine(config).dtype:
        raise InvalidParameter("kv_dtype", f"cannot be compared: {title}'s cache is in the type of --dtype, or in fp8")


def only_this_gpu(config: EngineConfig) -> dict[str, str]:
    """Environment variables that leave a process only the GPU that `config` names, or none."""
    from chairlift.engine.settings import resolve_machine

    if resolve_machine(config).device.type == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    index = config.device.partition(":")[2]
    if not index:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": index if visible is None else visible.split(",")[int(index)].strip()}


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
SPEED = (Column("Case", "name"), Column("Tokens/s", "tokens_per_second", ",.0f"))
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
    slots: Annotated[int, typer.Option("--slots", "--seats", help="Requests per step.")] = 256,
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
        _peer_option(metavar="FILE", help="The Python that has its package.", show_default="this one"),
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
        max_batch_requests=slots,
        max_batch_tokens=None if slots <= 256 else max(16384, slots),
    )
    config = for_throughput(config)
    names = [name.strip() for name in cases.split(",")]
    asked = {"shape": shape, "cases": names, "slots": slots, "scale": scale, "layers": layers} | options
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
    shape, rows, peer, columns = asked["shape"], run.rows, None, [*SPEED]
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
