"""Verifies the file of a known model by its SHA-256, once for each state of the file."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from chairlift.loading.known_models import KnownModel


def is_intact(model: KnownModel) -> bool:
    """Whether the model's file is there with the right content.

    The hash is computed again only if the file was replaced or changed: a record beside it holds the size, inode and
    times that it had. Writing to a file sets its change time, which programs cannot set back.
    """
    try:
        state = _state(model.path, model.sha256)
        if state["size"] != model.size:
            return False
        record = _record(model.path)
        with suppress(OSError, ValueError):
            if json.loads(record.read_text()) == state:
                return True
        with model.path.open("rb") as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False
    if intact:
        with suppress(OSError):  # the folder may be read-only: then the hash is computed every time
            scratch = record.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(state))
            scratch.replace(record)
    return intact


def _state(path: Path, sha256: str) -> dict[str, int | str]:
    stat = path.stat()
    return {
        "sha256": sha256,
        "size": stat.st_size,
        "inode": stat.st_ino,
        "modified": stat.st_mtime_ns,
        "changed": stat.st_ctime_ns,
    }


def _record(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")
