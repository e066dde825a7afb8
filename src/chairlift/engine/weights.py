"""Builds a model with its weights; on a CPU with packed ones of an earlier start, or it writes them for the next."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from chairlift.engine.memory_plan import expected_weight_bytes, require_memory
from chairlift.engine.settings import LoadSettings
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.known_models import cache_dir
from chairlift.loading.stored_weight import dequantized_matrices, read_ahead
from chairlift.loading.weight_cache.cache_file import UnusableCache
from chairlift.loading.weight_cache.store import (
    MappedWeights,
    WeightCache,
    WeightRecorder,
    checkpoint_state,
    code_state,
    config_state,
    weight_plugins,
)
from chairlift.machine.hardware import interleaved
from chairlift.models import build_model, is_native, rotations
from chairlift.models.base import CausalLM
from chairlift.options import format_bytes
from chairlift.progress import loading_progress

log = logging.getLogger("chairlift")

OFF = "off"
MIN_BYTES = 64 << 20  # Packing fewer takes a fraction of a second.
DISK_RESERVE = 1 << 30  # bytes of the disk that stay free

Build = Callable[[WeightCache], CausalLM]
"""Builds the model with the packed weights of a cache, or gives them to it."""


def build_with_weights(
    checkpoint: Checkpoint, settings: LoadSettings, num_parameters: int, *, progress: bool
) -> CausalLM:
    """Build the model; on a CPU, state its memory first and use packed weights of an earlier start."""
    config, quantization = settings.config, settings.quantization

    def build(cache: WeightCache) -> CausalLM:
        # What stays as it is stored, or is mapped from the cache, is not dequantized ahead of the model.
        stays = FORMATS.get(quantization).traits.keeps_stored or cache.mapped_bytes > 0
        stored = checkpoint.stored()
        with torch.inference_mode(), interleaved(), loading_progress(num_parameters, enabled=progress) as watched:
            return build_model(
                checkpoint.config,
                watched(read_ahead(stored if stays else dequantized_matrices(stored))),
                dtype=settings.model_dtype,
                device=settings.device,
                max_len=settings.max_model_len,
                quantization=quantization,
                quantize_head=config.quantize_head,
                batch_invariant=config.batch_invariant,
                weight_cache=cache,
            )

    if settings.device.type != "cpu" or config.load_format == "dummy":
        return build(WeightCache())
    _use_threads(settings.threads)
    num_bytes = expected_weight_bytes(checkpoint, quantization, settings.model_dtype)
    require_memory(checkpoint, num_bytes, settings)
    return _build_with_cache(build, checkpoint, num_bytes, settings)


def _use_threads(count: int) -> None:
    """Let torch and our kernels compute with this number of threads."""
    torch.set_num_threads(count)
    if find_spec("numba") is not None:
        from chairlift.kernels.cpu.threads import set_team_size

        set_team_size(count)


def _build_with_cache(build: Build, checkpoint: Checkpoint, num_bytes: int, settings: LoadSettings) -> CausalLM:
    """Build the model; its packed weights, of about `num_bytes`, are mapped from the cache where that is possible."""
    folder = _folder(checkpoint, num_bytes, settings)
    if folder is None:
        return build(WeightCache())
    identity = _identity(checkpoint, settings)
    path = folder / f"{_name(identity)}.weights"
    cached = _from_cache(build, path, identity, settings)
    if cached is not None:
        return cached
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            log.info("another process is packing the same weights: waiting for it")
            held = lock.acquire()
    except OSError as error:  # a folder that cannot be written, or a file system without locks
        log.warning(f"packed weights are not cached: {folder}: {error.strerror or error}")
        return build(WeightCache())
    with held:
        # Another process may have written it during the wait.
        cached = _from_cache(build, path, identity, settings, again=True)
        return cached or _build_and_write(build, path, identity, num_bytes, settings)


def _folder(checkpoint: Checkpoint, num_bytes: int, settings: LoadSettings) -> Path | None:
    """The folder of the cache, or None if this model is not cached."""
    configured, format = settings.config.weight_cache, FORMATS.get(settings.quantization)
    own_arrays = format.packed_arrays is not WeightFormat.packed_arrays
    packs = own_arrays or format.traits.becomes_blocks(settings.model_dtype, settings.device)
    if configured == OFF or not packs or not is_native(checkpoint.config) or num_bytes < MIN_BYTES:
        return None
    return cache_dir() / "weights" if configured is None else Path(configured).expanduser()


def weights_hash(checkpoint: Checkpoint, settings: LoadSettings) -> str:
    """A hash of the files of a checkpoint, of how they are read, and of the code that computes with them. With some
    models, keys depend on the longest sequence, too."""
    files = checkpoint_state(checkpoint.path)["files"]
    parts = (config_state(checkpoint.config), settings.quantization, settings.config.quantize_head, code_state())
    ropes = rotations(checkpoint.config, settings.max_model_len)
    return hashlib.sha256(repr((files, *parts, ropes)).encode()).hexdigest()


def _identity(checkpoint: Checkpoint, settings: LoadSettings) -> dict[str, Any]:
    from chairlift.kernels.cpu.simd import find_instruction_set  # importing numba takes a while

    return {
        "checkpoint": checkpoint_state(checkpoint.path),
        "config": config_state(checkpoint.config),
        "quantization": settings.quantization,
        "quantize_head": settings.config.quantize_head,
        "tied": bool(checkpoint.config.get("tie_word_embeddings")),
        "dtype": settings.config.dtype,
        "instruction_set": find_instruction_set().name,
        "plugins": [str(file.resolve()) for file in weight_plugins()],
        "code": code_state(),
    }


def _name(identity: dict[str, Any]) -> str:
    """A name that stays the same when a checkpoint or a plugin changes: its new weights replace the old ones."""
    path = Path(identity["checkpoint"]["path"])
    lasting = [str(path), *(str(identity[key]) for key in ("quantization", "quantize_head", "tied", "dtype"))]
    lasting += identity["plugins"]
    return f"{path.stem}-{hashlib.sha256(repr(lasting).encode()).hexdigest()[:12]}"


def _from_cache(
    build: Build, path: Path, identity: dict[str, Any], settings: LoadSettings, *, again: bool = False
) -> CausalLM | None:
    if not path.exists():
        return None
    try:
        cache = MappedWeights(path, identity, settings.threads)
        model = build(cache)
    except UnusableCache as problem:
        log.log(logging.DEBUG if again else logging.INFO, f"the cached weights {path} are not used: {problem}")
        return None
    log.info(f"cache      {format_bytes(cache.mapped_bytes)} of packed weights mapped from {path}")
    return model


def _build_and_write(
    build: Build, path: Path, identity: dict[str, Any], num_bytes: int, settings: LoadSettings
) -> CausalLM:
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes + DISK_RESERVE:
        needed = f"{format_bytes(num_bytes)} and {format_bytes(DISK_RESERVE)} in reserve"
        log.warning(f"packed weights are not cached: {path.parent} has {format_bytes(free)} left, but needs {needed}")
        return build(WeightCache())
    try:
        recorder = WeightRecorder(path, identity, settings.threads)
    except OSError as error:
        log.warning(f"packed weights are not cached: {path}: {error.strerror or error}")
        return build(WeightCache())
    try:
        model = build(recorder)
        recorder.finish()
    finally:
        recorder.close()
    return model
