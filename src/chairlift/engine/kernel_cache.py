"""Compiles all GPU kernels of a model ahead of time, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from chairlift.config import EngineConfig
from chairlift.engine.load import load
from chairlift.engine.runner_factory import RunnerFactory
from chairlift.engine.settings import resolve_engine, resolve_machine
from chairlift.engine.startup import load_draft
from chairlift.errors import InvalidParameter
from chairlift.kernels.gpu import described_gpu, known_gpu
from chairlift.runner.gpu.runner import GPURunner

if TYPE_CHECKING:
    from chairlift.kernels.compilation.spec import KernelSpec


def kernels_of_model(name: str, config: EngineConfig, gpu_name: str) -> list[KernelSpec]:
    """The kernels that an engine with this model and config launches on a GPU, found by computing steps with tensors
    that have no memory."""
    if config.speculate not in (None, "ngram"):
        raise InvalidParameter("speculate", "the kernels of draft networks are compiled at the start of an engine only")
    from chairlift.kernels.compilation.spec import KernelRecorder

    gpu = known_gpu(gpu_name)
    built: list[GPURunner] = []
    with described_gpu(gpu), torch.inference_mode():
        # Weights that are quantized while they are loaded need kernels, too.
        loading = KernelRecorder(gpu.arch).record(lambda: built.append(_build(name, replace(config, device="cuda"))))
        return [*dict.fromkeys([*loading, *built[0].preparation.all_kernels()])]


def _build(name: str, config: EngineConfig) -> GPURunner:
    machine = resolve_machine(config)
    loaded = load(name, machine, progress=False)
    draft = load_draft(loaded, config)
    settings = resolve_engine(machine, loaded.model)
    runner = RunnerFactory(loaded.model, settings, None, draft).build().runner
    if not isinstance(runner, GPURunner):
        raise InvalidParameter("model", f"has no kernels of ours there: its attention is {settings.attention.name}")
    return runner


def fill_kernel_cache(specs: Sequence[KernelSpec], advance: Callable[[int], None]) -> int:
    """Compile these kernels into Triton's cache; return how many were missing.

    `advance` is called with how many are done.
    """
    from chairlift.kernels.compilation.pool import KernelCompiler, libcuda_stub

    with libcuda_stub() as libraries:
        compiler = KernelCompiler(libraries)
        compiler.request(specs)
        for done, spec in enumerate(specs, 1):
            compiler.wait([spec])
            advance(done)
    for spec, problem in compiler.problems.items():
        problem = f"{len(compiler.problems)} kernels cannot be compiled for it; {spec.name}: {problem}"
        raise InvalidParameter("device", problem)
    return compiler.num_compiled
