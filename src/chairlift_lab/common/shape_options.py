"""A model by name, or random weights of some shape: what the commands that measure speed are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.options.declaration import option_of
from chairlift.terminal.options import EngineOptions, given

if TYPE_CHECKING:
    from chairlift.engine.settings import MachineSettings
    from chairlift.models.base import CausalLM
    from chairlift_lab.common.floor import Ceilings


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
