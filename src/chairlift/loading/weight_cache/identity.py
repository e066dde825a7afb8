"""What tells one state of a checkpoint's files from another without reading all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 64, 4096


def checkpoint_state(path: Path) -> dict[str, Any]:
    """The size and time of change of each file of weights, and a hash of samples of its content."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {"path": str(path.resolve()), "files": [_file_state(file) for file in files]}


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
