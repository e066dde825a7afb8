"""Shapes of public models for runs with random weights: the options that name them, and the cases of `bench shapes`."""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.options import option_of, read_text
from chairlift.progress import Note
from chairlift.server.process.this_process import loaded_objects_frozen
from chairlift.terminal.options import EngineOptions, given
from chairlift_lab.common.engines import serve_at_once
from chairlift_lab.common.floor import Ceilings, ModelCost, ceilings_for, floor_seconds

if TYPE_CHECKING:
    import torch

    from chairlift.engine.engine import Engine
    from chairlift.engine.settings import MachineSettings
    from chairlift.models.base import CausalLM


# The parts of each config.json that decide the shape. In bfloat16 qwen3-next-80b needs more than the memory of an H200:
# --layers 24 is a half of it. llama3-8b-gptq has 4-bit weights in a format that other engines read as well.
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


@contextmanager
def config_file(shape: str, parameter: str = "shape", *, layers: int | None = None) -> Iterator[str]:
    """The path of a config.json: that of a shape by name, or `shape` itself, with only the first `layers`."""
    if shape not in SHAPES and not Path(shape).exists():
        raise InvalidParameter(parameter, f"there is no file {shape!r}; shapes by name are {', '.join(SHAPES)}")
    if shape not in SHAPES and layers is None:
        yield shape
        return
    config = SHAPES[shape] if shape in SHAPES else read_json_config(Path(shape), parameter)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config if layers is None else _shortened(config, layers)))
        yield str(path)


def read_json_config(path: Path, parameter: str) -> dict[str, Any]:
    """The content of a config.json, or of that in a folder; errors name `parameter`."""
    file = path / "config.json" if path.is_dir() else path
    text = read_text(file, parameter)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(parameter, f"cannot read {str(file)!r} ({error})") from None
    if not isinstance(config, dict):
        raise InvalidParameter(parameter, f"{str(file)!r} must hold a JSON object")
    return config


def _shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with the first layers only; of layers that share keys and values the same part at most."""
    before = config["num_hidden_layers"]
    if not 1 <= layers <= before:
        raise InvalidParameter("layers", f"must be between 1 and {before}, got {layers}")
    shorter = config | {"num_hidden_layers": layers}
    types = config.get("layer_types", ["full_attention"] * before)[:layers]
    if "layer_types" in config:
        shorter["layer_types"] = types
    if "num_kv_shared_layers" in config:  # every type needs a layer that stores them
        own = max(types.index(kind) for kind in set(types)) + 1
        shorter["num_kv_shared_layers"] = min(config["num_kv_shared_layers"] * layers // before, layers - own)
    return shorter


# Small models with random weights: for figures that depend on shapes only, and for `bench stress`.
SMALL_MODELS: dict[str, Any] = json.loads(Path(__file__).with_name("small_models.json").read_text())


def random_llama(device: torch.device, dtype: torch.dtype) -> CausalLM:
    import torch

    from chairlift.models import build_model
    from chairlift.models.dummy import dummy_tensors

    with torch.inference_mode():
        config = SMALL_MODELS["llama"]
        return build_model(config, dummy_tensors(config, device), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Where to compute, and in what type."""

    device: str = option_of(EngineConfig, "device")
    dtype: str = option_of(EngineConfig, "dtype")

    def resolve(self) -> MachineSettings:
        from chairlift.engine.settings import resolve_machine

        return resolve_machine(EngineConfig(**asdict(self)))


TokenizerModel = Annotated[str, typer.Option("--model", "-m", help="Model whose tokenizer is loaded.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    model_config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Random weights for this config.json, or for a shape by name: qwen3-0.6b, llama3-8b.",
            rich_help_panel="Model",
            show_default="none",
        ),
    ] = None

    @contextmanager
    def resolve(self, context: typer.Context, engine: EngineOptions) -> Iterator[tuple[str, EngineConfig, str]]:
        """The path to load, the config and a display name."""
        options = engine.config()
        if self.model_config is None:
            yield engine.model, EngineConfig(**options), engine.model
            return
        if given(context, "model"):
            raise InvalidParameter("model_config", "replaces the model by random weights; give only one of them")
        if given(context, "load_format") and engine.load_format != "dummy":
            raise InvalidParameter("load_format", "must be dummy with --model-config")
        with config_file(self.model_config, "model_config") as path:
            yield path, EngineConfig(**options | {"load_format": "dummy"}), self.model_config


def model_settings(name: str, model: CausalLM, ceilings: Ceilings) -> dict[str, Any]:
    """The model and the ceilings of the machine, for a report."""
    return {
        "model": name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": getattr(model, "quantization", "none"),
        "bytes_per_second": ceilings.bytes_per_second,
        "flops_per_second": ceilings.flops_per_second,
    }


def ceilings_line(ceilings: Ceilings) -> str:
    return f"Ceilings here: {ceilings.bytes_per_second / 1e9:,.1f} GB/s, {ceilings.flops_per_second / 1e9:,.0f} GFLOP/s"


VOCABULARY = 10_001  # token ids of prompts
WARM_UP_REQUESTS, WARM_UP_TOKENS = 256, 6  # Enough steps for graphs to be captured.


@dataclass(frozen=True, slots=True)
class ShapeCase:
    name: str
    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """The rows of all cases, and what they depend on."""

    rows: list[dict[str, Any]]
    ceilings: Ceilings
    ready_seconds: float  # It is counted from the import of torch to the first token.
    vocabulary: int  # number of token ids that prompts are drawn from


class Cases(NamedTuple):
    """What both engines run: the cases by name for the first `layers` of a shape, all lengths divided by `scale`."""

    shape: str
    config: EngineConfig
    names: Sequence[str]
    scale: int = 1
    layers: int | None = None


def make_cases(names: Sequence[str], vocab: int, scale: int = 1) -> list[ShapeCase]:
    """Requests for the cases by name; `scale` divides all lengths.

    decode-N: N requests of 128 + 256 tokens. load-N: N requests of 100 to 1,024 tokens each way, all at once.
    prefill-N: N prompts of 2,048 tokens with one output token each.

    load-N-SEED: other lengths. With a vocabulary of `VOCABULARY` and scale 1, load-256, load-256-1 and load-1024-3 are
    the requests of a workload that is in public use (nano-vllm's benchmark), token by token.
    """
    return [_make_case(name, vocab, scale) for name in names]


def _make_case(name: str, vocab: int, scale: int) -> ShapeCase:
    parts = re.fullmatch(r"(decode|prefill)-([1-9]\d*)|(load)-([1-9]\d*)(?:-(\d+))?", name)
    if parts is None:
        raise InvalidParameter("cases", f"unknown case {name!r}; choose from decode-N, load-N[-SEED], prefill-N")
    kind, count = parts[1] or parts[3], int(parts[2] or parts[4])
    # One engine runs all cases: a prompt of one must not be cached for another.
    rng = random.Random(int(parts[5] or 0) if kind == "load" else name)
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


def run_shape(cases: Cases, note: Note) -> ShapeRun:
    from chairlift.engine.startup import load_engine
    from chairlift_lab.common.floor import model_cost

    begin = time.perf_counter()
    note("starting")
    with config_file(cases.shape, layers=cases.layers) as path:
        started = load_engine(path, cases.config, progress=False)
    model = started.runner.model
    serve_at_once(started.engine, [[1]], [1])
    ready = time.perf_counter() - begin
    note("capturing graphs")
    started.runner.capture_decodes()
    note("measuring the ceilings")
    ceilings = ceilings_for(model)
    cost = model_cost(started)
    vocabulary = min(VOCABULARY, model.vocab_size)
    rows = []
    for case in make_cases(cases.names, vocabulary, cases.scale):
        warm_up = warm_up_of(case)
        serve_at_once(started.engine, warm_up.prompts, warm_up.outputs)
        started.runner.capture_missed()  # A server does this while idle.
        note(f"{case.name}: {len(case.prompts)} requests")
        with loaded_objects_frozen():  # The server does the same.
            rows.append(run_case(started.engine, case, cost, ceilings))
    return ShapeRun(rows, ceilings, ready, vocabulary)


def run_case(engine: Engine, case: ShapeCase, cost: ModelCost, ceilings: Ceilings) -> dict[str, Any]:
    served = serve_at_once(engine, case.prompts, case.outputs)
    lengths = [len(prompt) for prompt in case.prompts]
    tokens = sum(map(len, served.token_times))
    floor = floor_seconds(lengths, case.outputs, cost, ceilings)
    return {
        "name": case.name,
        "requests": len(case.prompts),
        "prompt_tokens": sum(lengths),
        "output_tokens": tokens,
        "seconds": served.seconds,
        "floor_seconds": floor,
        "steps": len(served.steps),
        "device_seconds": sum(step.timing.forward + step.timing.sample for step in served.steps),
        "host_seconds": sum(
            step.schedule_seconds + step.apply_seconds + step.timing.build for step in served.steps
        ),  # scheduling, packing and applying
        "tokens_per_second": tokens / served.seconds,
        "share_of_floor": floor / served.seconds,
    }
