"""`chairlift compile`: fill the kernel cache for a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import SERVERS, app
from chairlift.config import EngineConfig, device_option
from chairlift.errors import InvalidParameter
from chairlift.terminal.options import EngineOptions

CACHE_VARIABLE = "TRITON_CACHE_DIR"


def _check_gpu(parameter: str, value: str) -> None:
    from chairlift.kernels.gpu import known_gpu

    known_gpu(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(EngineOptions):
    device: str = device_option(
        "h200", help="The GPU to compile for: a100, a10, l4, l40s, h100 or h200.", check=_check_gpu
    )


@app.command(
    group=SERVERS,
    examples=[
        "chairlift compile Qwen/Qwen3-0.6B --device h200 --out /opt/kernels",
        "chairlift compile ./checkpoint --device h100 --out kernels --quantization fp8",
        "TRITON_CACHE_DIR=/opt/kernels chairlift serve Qwen/Qwen3-0.6B",
    ],
)
def compile(
    engine: CompileOptions,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The cache, the TRITON_CACHE_DIR of the server.")],
) -> None:
    """Compile the GPU kernels of a model ahead of time, for instance into an image.

    No GPU is needed. Give the options that the server will have. The cache is
    valid for the same versions of chairlift, Triton and Python, in a folder of
    the same name: start the server with TRITON_CACHE_DIR=FOLDER.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InvalidParameter("device", "TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled")
    out.mkdir(parents=True, exist_ok=True)
    os.environ[CACHE_VARIABLE] = str(out.resolve())  # Triton reads it later.

    from chairlift.engine.kernel_cache import fill_kernel_cache, kernels_of_model
    from chairlift.progress import watch

    with watch(enabled=not engine.quiet) as note:
        note("finding the kernels")
        specs = kernels_of_model(engine.model, EngineConfig(**engine.config() | {"device": "auto"}), engine.device)
        missing = fill_kernel_cache(specs, lambda done: note(f"{done} of {len(specs)} kernels"))
    typer.echo(f"{len(specs)} kernels for {engine.device} in {out}, {missing} of them compiled now")
