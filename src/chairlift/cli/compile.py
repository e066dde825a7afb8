"""`chairlift compile`: fill the kernel cache for a GPU, or for the CPU of this machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import SERVERS, app
from chairlift.config import EngineConfig, device_option
from chairlift.errors import InvalidParameter
from chairlift.terminal.options import EngineOptions, given

CACHE_VARIABLE, CPU_CACHE_VARIABLE = "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"
CPU = "cpu"


def _check_device(parameter: str, value: str) -> None:
    if value != CPU:
        from chairlift.kernels.gpu import known_gpu

        known_gpu(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(EngineOptions):
    device: str = device_option(
        "h200",
        help="What to compile for: this machine's cpu, or a GPU: a100, a10, l4, l40s, h100 or h200.",
        check=_check_device,
    )


@app.command(
    group=SERVERS,
    examples=[
        "chairlift compile --device cpu",
        "chairlift compile Qwen/Qwen3-0.6B --device h200 --out /opt/kernels",
        "chairlift compile ./checkpoint --device h100 --out kernels --quantization fp8",
        "TRITON_CACHE_DIR=/opt/kernels chairlift serve Qwen/Qwen3-0.6B",
    ],
)
def compile(
    context: typer.Context,
    engine: CompileOptions,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The cache; for a GPU the TRITON_CACHE_DIR of the server."),
    ] = None,
) -> None:
    """Compile kernels ahead of time, for instance into an image.

    With --device cpu, those for the CPU of this machine, which the first start
    compiles otherwise: for models with 8-bit weights, or for MODEL if there is
    one. `make install` does so.

    For a GPU, none is needed here. Give the options that the server will have.
    The cache is valid for the same versions of chairlift, Triton and Python, in a
    folder of the same name: start the server with TRITON_CACHE_DIR=FOLDER.
    """
    if engine.device == CPU:
        if out is not None:
            os.environ[CPU_CACHE_VARIABLE] = str(out.resolve())  # numba reads it when it is imported.
        _compile_for_this_cpu(engine, engine.model if given(context, "model") else None)
        return
    if out is None:
        raise InvalidParameter("out", "is missing; name the folder of the cache for the GPU")
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


def _compile_for_this_cpu(engine: CompileOptions, model: str | None) -> None:
    from chairlift.engine.kernel_cache import compile_cpu_kernels

    began = time.monotonic()
    count, folder = compile_cpu_kernels(model, EngineConfig(**engine.config()), progress=not engine.quiet)
    if engine.quiet:
        return
    if count == 0:
        typer.echo(f"the CPU kernels are compiled already, in {folder}")
    elif folder is None:
        typer.echo("the CPU kernels are compiled, but cannot be kept")
    else:
        typer.echo(f"{count} CPU kernels compiled in {time.monotonic() - began:.0f} s, in {folder}")
