"""Shapes of public models for runs with random weights, and the options that name a model, a shape or a device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.options import option_of, read_text
from chairlift.terminal.options import EngineOptions, given

if TYPE_CHECKING:
    import torch

    from chairlift.engine.settings import MachineSettings
    from chairlift.models.base import CausalLM
    from chairlift_lab.common.floor import Ceilings


# The parts of each config.json that decide the shape. In bfloat16 qwen3-next-80b needs more than the memory of an H200:
# --layers 24 is a half of it. llama3-8b-gptq has 4-bit weights in a format that other engines read as well.
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


@contextmanager
def config_file(shape: str, parameter: str = "shape", *, layers: int | None = None) -> Iterator[str]:
    """The path of a config.json: that of a shape by name, or `shape` itself; `layers`: with only so many layers."""
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


SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def random_llama(device: torch.device, dtype: torch.dtype) -> CausalLM:
    """A small model with random weights, for figures that depend on shapes only."""
    import torch

    from chairlift.models import build_model
    from chairlift.models.dummy import dummy_tensors

    with torch.inference_mode():
        return build_model(SMALL_LLAMA, dummy_tensors(SMALL_LLAMA, device), dtype=dtype, device=device)


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
    def resolve(
        self, context: typer.Context, engine: EngineOptions, argument: str | None
    ) -> Iterator[tuple[str, EngineConfig, str]]:
        """The path to load, the config and a display name; `argument` is a model typed without --model."""
        from chairlift_lab.common.model_shapes import config_file

        if argument is not None and given(context, "model"):
            raise InvalidParameter("model", f"was given twice: {argument!r} and {engine.model!r}")
        options = engine.config()
        if self.model_config is None:
            model = argument or engine.model
            yield model, EngineConfig(**options), model
            return
        if argument is not None or given(context, "model"):
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
