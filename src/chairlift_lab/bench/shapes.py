"""The speed of a model of a given shape, with random weights: single requests, batches, load and prompts."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options.declaration import option_of
from chairlift.progress import Note
from chairlift.server.process.this_process import loaded_objects_frozen
from chairlift.terminal.options import refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.engine_run import serve_at_once
from chairlift_lab.common.floor import Ceilings, ModelCost, ceilings_for, floor_seconds
from chairlift_lab.common.model_shapes import SHAPES, config_file
from chairlift_lab.common.plot import Plot, picture
from chairlift_lab.peers.process import PeerFailed, PeerProcess
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine
    from chairlift.engine.startup import StartedEngine

VOCABULARY = 10_001  # token ids of prompts
WARM_UP_REQUESTS, WARM_UP_TOKENS = 256, 6  # Enough steps for graphs to be captured.


@dataclass(frozen=True, slots=True)
class ShapeCase:
    name: str
    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    floor_seconds: float
    steps: int
    device_seconds: float  # busy time of the device, by its own clock
    host_seconds: float  # scheduling, packing and applying

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def share_of_floor(self) -> float:
        return self.floor_seconds / self.seconds

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "share_of_floor": self.share_of_floor}


@dataclass(frozen=True, slots=True)
class ShapeRun:
    results: list[CaseResult]
    ceilings: Ceilings
    ready_seconds: float  # until the first token, after importing torch
    vocabulary: int  # number of token ids that prompts are drawn from


def make_cases(names: Sequence[str], vocab: int, scale: int = 1) -> list[ShapeCase]:
    """Requests for the cases by name; `scale` divides all lengths.

    decode-N: N requests of 128 + 256 tokens. load-N: N requests of 100 to 1,024 tokens each way, all at once.
    prefill-N: N prompts of 2,048 tokens with one output token each.

    load-N-SEED: other lengths. With a vocabulary of `VOCABULARY` and scale 1, load-256, load-256-1 and load-1024-3 are
    the requests of a workload that is in public use (nano-vllm's benchmark), token by token.
    """
    return [_make_case(name, vocab, scale) for name in names]


def _make_case(name: str, vocab: int, scale: int) -> ShapeCase:
    found = re.fullmatch(r"(decode|prefill)-([1-9]\d*)|(load)-([1-9]\d*)(?:-(\d+))?", name)
    if found is None:
        raise InvalidParameter("cases", f"unknown case {name!r}; choose from decode-N, load-N[-SEED], prefill-N")
    kind, count = found[1] or found[3], int(found[2] or found[4])
    # One engine runs all cases: a prompt of one must not be cached for another.
    rng = random.Random(int(found[5] or 0) if kind == "load" else name)
    spans = {"decode": ((128, 128), (256, 256)), "load": ((100, 1024), (100, 1024)), "prefill": ((2048, 2048), (1, 1))}
    (low_in, high_in), (low_out, high_out) = (tuple(max(1, limit // scale) for limit in span) for span in spans[kind])
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(low_in, high_in))] for _ in range(count)]
    return ShapeCase(name, prompts, [rng.randint(low_out, high_out) for _ in range(count)])


def warm_up_of(case: ShapeCase) -> ShapeCase:
    """A warm-up that compiles, captures and allocates what the case needs.

    Its prompts have the same lengths but are reversed, so that no prefix of the case is cached.
    """
    prompts = [prompt[::-1] for prompt in case.prompts[:WARM_UP_REQUESTS]]
    return ShapeCase("warm-up", prompts, [min(WARM_UP_TOKENS, count) for count in case.outputs[:WARM_UP_REQUESTS]])


def run_shape(
    shape: str,
    config: EngineConfig,
    cases: Sequence[str],
    note: Note,
    *,
    scale: int = 1,
    layers: int | None = None,
) -> ShapeRun:
    from chairlift.engine.startup import load_engine

    begun = time.perf_counter()
    note("starting")
    with config_file(shape, layers=layers) as path:
        started = load_engine(path, config, progress=False)
    model = started.runner.model
    serve_at_once(started.engine, [[1]], [1])
    ready = time.perf_counter() - begun
    note("capturing graphs")
    started.runner.capture_decodes()
    note("measuring the ceilings")
    ceilings = ceilings_for(model)
    cost = model_cost(started)
    vocabulary = min(VOCABULARY, model.vocab_size)
    results = []
    for case in make_cases(cases, vocabulary, scale):
        warm_up = warm_up_of(case)
        serve_at_once(started.engine, warm_up.prompts, warm_up.outputs)
        started.runner.capture_missed()  # A server does this while idle.
        note(f"{case.name}: {len(case.prompts)} requests")
        with loaded_objects_frozen():  # The server does the same.
            results.append(run_case(started.engine, case, cost, ceilings))
    return ShapeRun(results, ceilings, ready, vocabulary)


def model_cost(started: StartedEngine) -> ModelCost:
    from chairlift.engine.memory_plan import bytes_per_token
    from chairlift.models.decoder import Decoder
    from chairlift_lab.common.step_work import linear_bytes, mixtures_of, products, total

    model, keys = started.runner.model, started.runner.storage.keys
    dtype = keys[0].dtype if keys else model.dtype
    windows: dict[int, int] = {}
    for layer in model.attention_layers:
        window = layer.window or layer.chunk  # At most so many positions of a chunk are read.
        if window:
            windows[window] = windows.get(window, 0) + bytes_per_token([layer], dtype)
    moved: dict[str, Any] = {
        "kv_bytes": bytes_per_token(model.attention_layers, dtype),
        "window_bytes": windows,
        "state_bytes": sum(layer.num_bytes for layer in model.recurrent_layers),
    }
    if not isinstance(model, Decoder):
        weights = model.num_weight_bytes()
        return ModelCost(weights, 2 * (weights // model.dtype.itemsize), **moved)
    # An embedding lookup reads one row; a head that shares the matrix reads all of it.
    step, prompt_token = total(products(model, 1, sampled=1)), total(products(model, 1, sampled=0))
    mixtures = mixtures_of(model)
    others = step.bytes + linear_bytes(model.head) - sum(mixture.read_bytes(1) for mixture in mixtures)
    return ModelCost(round(others), int(prompt_token.flops), **moved, mixtures=mixtures)


def run_case(engine: Engine, case: ShapeCase, cost: ModelCost, ceilings: Ceilings) -> CaseResult:
    served = serve_at_once(engine, case.prompts, case.outputs)
    lengths = [len(prompt) for prompt in case.prompts]
    return CaseResult(
        name=case.name,
        requests=len(case.prompts),
        prompt_tokens=sum(lengths),
        output_tokens=sum(map(len, served.token_times)),
        seconds=served.seconds,
        floor_seconds=floor_seconds(lengths, case.outputs, cost, ceilings),
        steps=len(served.steps),
        device_seconds=sum(step.timing.forward + step.timing.sample for step in served.steps),
        host_seconds=sum(step.schedule_seconds + step.apply_seconds + step.timing.build for step in served.steps),
    )


CHECK_SECONDS = 60.0
OWN_PROGRAM = "run_chairlift_shapes.py"


@dataclass(frozen=True, slots=True)
class _Kind:
    title: str
    program: str


_KINDS = {"vllm": _Kind("vLLM", "run_vllm_shapes.py")}
SHAPE_PEERS = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class PeerRun:
    start_seconds: float  # Counted from the start of its process.
    seconds: list[float]  # One for each case that was completed, in order.


@dataclass(frozen=True, slots=True)
class ShapePeer:
    """A peer; `python` has its package."""

    name: str
    python: Path = Path(sys.executable)
    timeout: float = 1800.0  # seconds for all cases, loading included

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise InvalidParameter("peer", f"there is no {self.name!r}; choose from {', '.join(SHAPE_PEERS)}")
        if not self.python.exists():
            raise InvalidParameter("peer_python", f"there is no {str(self.python)!r}")
        if not self.timeout > 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.timeout:g}")

    @property
    def title(self) -> str:
        return _KINDS[self.name].title

    def version(self) -> str:
        """The version of its package; raises if it is not installed."""
        try:
            found = PeerProcess(self.python, _KINDS[self.name].program, CHECK_SECONDS).ask("--check")
        except PeerFailed as failure:
            raise InvalidParameter("peer_python", f"{self.python}: {failure}") from None
        if "version" not in found:
            problem = f"{self.python} has no package {found.get('missing')}: install it there, or name the Python"
            raise InvalidParameter("peer_python", f"{problem} that has it")
        return str(found["version"])

    def compare(
        self,
        shape: str,
        config: EngineConfig,
        cases: Sequence[str],
        note: Note,
        *,
        scale: int = 1,
        layers: int | None = None,
        keep: Callable[[ShapeComparison], None] = lambda half: None,
    ) -> ShapeComparison:
        """Run our engine, then the peer. Options are checked first.

        `keep` is called with our half as soon as it is complete, since the peer takes minutes and may be interrupted.
        """
        _refuse_other_formats(config, self.title)
        version = self.version()
        own, start_seconds = _run_own(shape, config, cases, note, scale=scale, layers=layers)
        half = ShapeComparison(self, version, own, start_seconds, None)
        keep(half)
        theirs, failure = self._run(shape, config, make_cases(cases, own.vocabulary, scale), note, layers)
        return replace(half, theirs=theirs, failure=failure)

    def _run(
        self, shape: str, config: EngineConfig, cases: Sequence[ShapeCase], note: Note, layers: int | None
    ) -> tuple[PeerRun | None, PeerFailed | None]:
        """Run the same cases in the same number format; after a failure, return the completed ones."""
        from chairlift.engine.settings import resolve_machine

        job = {
            "dtype": str(resolve_machine(config).dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "prefix_caching": config.prefix_caching,
            "quantization": "fp8" if config.quantization == "fp8" else None,  # None: what its config.json names
            "kv_dtype": "fp8" if config.kv_dtype == "fp8" else "auto",
            "cases": [asdict(case) for case in cases],
            "warm_ups": [asdict(warm_up_of(case)) for case in cases],
        }
        environment = {"HF_HUB_OFFLINE": "1"} | _only_this(config)
        process = PeerProcess(self.python, _KINDS[self.name].program, self.timeout, environment)
        with config_file(shape, layers=layers) as path, tempfile.TemporaryDirectory() as folder:
            source = Path(path).expanduser()
            shutil.copyfile(source / "config.json" if source.is_dir() else source, Path(folder) / "config.json")
            answer: dict[str, Any] = {}
            try:
                _ask(process, job | {"model": folder}, self.title, note, answer)
                _check_answer(answer, len(cases))
            except PeerFailed as failure:
                return _finished(answer, len(cases)), failure
        return PeerRun(answer["start_seconds"], answer["seconds"]), None


def _finished(answer: Mapping[str, Any], num_cases: int) -> PeerRun | None:
    """What there is of an answer, if it makes sense."""
    seconds = answer.get("seconds", [])
    if "start_seconds" not in answer or len(seconds) > num_cases or not all(one > 0 for one in seconds):
        return None
    return PeerRun(answer["start_seconds"], seconds)


def _check_answer(answer: Mapping[str, Any], num_cases: int) -> None:
    for key in ("start_seconds", "seconds"):
        if key not in answer:
            raise PeerFailed(f"answered without {key!r}")
    seconds = answer["seconds"]
    if len(seconds) != num_cases or not all(one > 0 for one in seconds):
        raise PeerFailed(f"answered {seconds} as the seconds of {num_cases} cases")


@dataclass(frozen=True, slots=True)
class ShapeComparison:
    """Both runs; ours is complete even if the peer failed."""

    peer: ShapePeer
    version: str
    own: ShapeRun
    own_start_seconds: float  # Counted from the start of our process to its first token.
    theirs: PeerRun | None
    failure: PeerFailed | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that a peer adds to the report."""
        start = None if self.theirs is None else self.theirs.start_seconds
        failure = None if self.failure is None else str(self.failure)
        peer = {"name": self.peer.name, "version": self.version, "start_seconds": start, "failure": failure}
        return {"start_seconds": self.own_start_seconds, "peer": peer}

    def rows(self) -> list[dict[str, Any]]:
        rows = [result.row() for result in self.own.results]
        for row, seconds in zip(rows, [] if self.theirs is None else self.theirs.seconds, strict=False):
            row["peer_seconds"] = seconds
            row["peer_tokens_per_second"] = row["output_tokens"] / seconds
            row["times_peer"] = seconds / row["seconds"]
        return rows

    def complete_peer(self) -> str | None:
        """The peer's title if it ran all cases."""
        return None if self.theirs is None or self.failure is not None else self.peer.title


def _run_own(
    shape: str, config: EngineConfig, cases: Sequence[str], note: Note, *, scale: int = 1, layers: int | None = None
) -> tuple[ShapeRun, float]:
    """`run_shape` in a process of its own, and the seconds from its start to its first token."""
    process = PeerProcess(Path(sys.executable), OWN_PROGRAM, threading.TIMEOUT_MAX)
    job = {"shape": shape, "config": asdict(config), "cases": list(cases), "scale": scale, "layers": layers}
    try:
        answer = _ask(process, job, "Chairlift", note)
    except PeerFailed as failure:
        raise ChairliftError(f"Chairlift {failure}") from None
    if "parameter" in answer:
        raise InvalidParameter(answer["parameter"], answer["problem"])
    if "problem" in answer:
        raise ChairliftError(answer["problem"])
    results = [CaseResult(**result) for result in answer["results"]]
    run = ShapeRun(results, Ceilings(**answer["ceilings"]), answer["ready_seconds"], answer["vocabulary"])
    return run, answer["start_seconds"]


def _ask(
    process: PeerProcess, job: Mapping[str, Any], title: str, note: Note, answered: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a process and return its last line; `answered` collects the content of all lines, also before a failure."""

    def progress(line: dict[str, Any]) -> None:
        if answered is not None:
            answered.update(line)
        if "note" in line:
            note(f"{title}: {line['note']}")

    note(f"{title}: starting")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
        return process.ask(str(file), progress=progress)


def _refuse_other_formats(config: EngineConfig, title: str) -> None:
    from chairlift.engine.settings import KV_DTYPES, resolve_machine

    allowed = ("none", "fp8", "checkpoint")  # the last: what the shape itself names
    if config.quantization not in allowed:
        raise InvalidParameter("quantization", f"cannot be compared: {title} has no such format; use one of {allowed}")
    if config.kv_dtype not in ("auto", "fp8") and KV_DTYPES[config.kv_dtype] != resolve_machine(config).dtype:
        raise InvalidParameter("kv_dtype", f"cannot be compared: {title}'s cache is in the type of --dtype, or in fp8")


def _only_this(config: EngineConfig) -> dict[str, str]:
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
    settings |= {} if compared is None else compared.settings()
    rows = [result.row() for result in run.results] if compared is None else compared.rows()
    peer = None if compared is None else compared.complete_peer()
    return BenchResult(
        settings,
        rows,
        [_table(asked["shape"], run, rows, compared)],
        picture(asked["shape"], shape_panels(rows, peer)),
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
