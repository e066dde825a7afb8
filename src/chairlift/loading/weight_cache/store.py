"""Where packed weights come from and go to, and what tells one state of their sources from another."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from chairlift.loading.weight_cache.cache_file import (
    CacheWriter,
    Identity,
    PackedArray,
    PackedWeightArrays,
    read_cache,
)
from chairlift.options import format_bytes
from chairlift.registry import plugin_sources

log = logging.getLogger("chairlift")


class WeightCache:
    """A place for packed weights. This one keeps none: they stay in the memory that they were packed into."""

    mapped_bytes = 0  # The pages of weights that are mapped from a file count as free memory.

    def find(self, name: str) -> PackedWeightArrays | None:
        """The arrays of a weight, if the cache has them."""
        return None

    def keep(self, name: str, format: str, arrays: Sequence[PackedArray]) -> Sequence[PackedArray]:
        """Called once a weight is packed; returns the arrays to use from now on."""
        return arrays


class MappedWeights(WeightCache):
    """Has the weights of a file, mapped. Raises UnusableCache if it is damaged or has another identity."""

    def __init__(self, path: Path, identity: Identity, num_threads: int) -> None:
        self._weights: Mapping[str, PackedWeightArrays] = read_cache(path, identity, num_threads)
        self.mapped_bytes = sum(weight.num_bytes for weight in self._weights.values())

    def find(self, name: str) -> PackedWeightArrays | None:
        return self._weights.get(name)


class WeightRecorder(WeightCache):
    """Writes weights to a file as they are packed; if that fails, the rest stays in memory."""

    def __init__(self, path: Path, identity: Identity, num_threads: int) -> None:
        """Raises OSError if the file cannot be created."""
        self._path, self._num_threads = path, num_threads
        self._writer: CacheWriter | None = CacheWriter(path, identity)

    def keep(self, name: str, format: str, arrays: Sequence[PackedArray]) -> Sequence[PackedArray]:
        if self._writer is None:
            return arrays
        try:
            kept = self._writer.add(name, PackedWeightArrays(format, arrays), self._num_threads)
        except OSError as error:
            self._give_up(error)
            return arrays
        self.mapped_bytes += kept.num_bytes
        return kept.arrays

    def finish(self) -> None:
        """Complete the file: all weights are in it."""
        if self._writer is None:
            return
        try:
            self._writer.finish()
        except OSError as error:
            self._give_up(error)
            return
        self._writer = None
        log.info(f"cache      {format_bytes(self.mapped_bytes)} of packed weights written to {self._path}")

    def close(self) -> None:
        """Remove a file that was not finished."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        log.warning(f"packed weights are not cached: {self._path}: {error.strerror or error}")
        self.close()


SAMPLES, SAMPLE_BYTES = 64, 4096
WEIGHT_FILES = ("*.safetensors", "*.index.json", "*quant*.json")  # The latter two say how to read the weights.
PACKAGE = Path(__file__).parents[2]
# All code between the files of a checkpoint and the packed numbers: readers, families, layers, formats and kernels.
SOURCES = ("kernels/cpu", "layers", "loading", "models")
VERSION = "__init__.py"  # The package's version stands there, and no layer imports the package from below.


def checkpoint_state(path: Path) -> dict[str, Any]:
    """The size and time of change of each file of weights, and a hash of samples of its content: not all is read."""
    files = [path] if path.is_file() else sorted(file for pattern in WEIGHT_FILES for file in path.glob(pattern))
    return {"path": str(path.resolve()), "files": [_file_state(file) for file in files]}


def config_state(config: Mapping[str, Any]) -> str:
    """A hash of a model's config."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode()).hexdigest()


def weight_plugins() -> list[Path]:
    """The files of plugins, without those that import something of ours but nothing that weights go through, as a
    scheduling policy does."""
    return [file for file in plugin_sources() if _may_change_weights(file.read_text(errors="replace"))]


def _may_change_weights(source: str) -> bool:
    parts = "|".join(sorted({part.partition("/")[0] for part in SOURCES}))
    own = re.compile(r"^\s*(?:from|import)\s+chairlift\b", re.MULTILINE)
    used = re.compile(rf"\bchairlift\.(?:{parts})\b|\bfrom\s+chairlift\s+import\b[^)]*\b(?:{parts})\b|import_module")
    return own.search(source) is None or used.search(source) is not None


@cache
def code_state() -> dict[str, str]:
    """The versions of the packages that compute packed weights, and a hash of the code of ours and of plugins that may
    change them. It takes some milliseconds, and finds what a version does not: an own change."""
    found = sorted(file for source in SOURCES for file in (PACKAGE / source).rglob("*"))
    files = [file for file in found if file.suffix in (".py", ".toml")]
    digest = hashlib.sha256()
    for file in (PACKAGE / VERSION, *files, *weight_plugins()):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return {"numpy": numpy.__version__, "torch": torch.__version__, "sources": digest.hexdigest()}


def _file_state(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest = hashlib.sha256()
        for index in range(SAMPLES):
            file.seek(index * max(0, stat.st_size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return {
        "name": path.name,
        "bytes": stat.st_size,
        "modified": stat.st_mtime_ns,
        "samples": digest.hexdigest(),
    }
