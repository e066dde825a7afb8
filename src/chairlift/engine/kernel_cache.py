"""Compiles kernels ahead of time: those of a model for a GPU, without one, and those for the CPU of this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from chairlift.config import EngineConfig
from chairlift.engine.load import load
from chairlift.engine.runner_factory import RunnerFactory
from chairlift.engine.settings import Machine, resolve_engine, resolve_machine
from chairlift.engine.startup import load_draft, load_engine
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


# Kernels are compiled for the types of their arrays, which are those of other dense models, whatever the sizes are.
SMALL_MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def compile_cpu_kernels(name: str | None, config: EngineConfig, *, progress: bool) -> tuple[int, Path | None]:
    """Start an engine on the CPU, with a small random model unless one is named: it compiles what is not kept yet.

    Returns how many functions were compiled, and the folder that keeps them, if there is one.
    """
    from chairlift.kernels.cpu.compiling import compilation, folder  # importing numba takes a while

    before = compilation.count
    if name is not None:
        load_engine(name, config, progress=progress)
    else:
        format = config.quantization
        if format == "auto":
            format = "int8" if Machine.here().has_fast_int8 else "none"
        with tempfile.TemporaryDirectory() as config_folder:
            (Path(config_folder) / "config.json").write_text(json.dumps(SMALL_MODEL))
            small = replace(config, load_format="dummy", quantization=format, kv_memory="1MiB", memory_share=None)
            load_engine(config_folder, small, progress=progress)
    return compilation.count - before, folder()
