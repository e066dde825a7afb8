"""What tells one state of a checkpoint's files, and of the code that reads them, from another."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from chairlift.registry import plugin_sources

SAMPLES, SAMPLE_BYTES = 64, 4096
WEIGHT_FILES = ("*.safetensors", "*.index.json", "*quant*.json")  # and those that say how to read them
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


@cache
def code_state() -> dict[str, str]:
    """The versions of the packages that compute packed weights, and a hash of the code of ours and of all plugins. It
    takes some milliseconds, and finds what a version does not: an own change."""
    files = [file for source in SOURCES for file in sorted((PACKAGE / source).rglob("*.py"))]
    digest = hashlib.sha256()
    for file in (PACKAGE / VERSION, *files, *plugin_sources()):
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
