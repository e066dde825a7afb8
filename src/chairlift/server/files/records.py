"""JSON records in a folder, one file each, replaced atomically."""

from __future__ import annotations

import copy
import errno
import fcntl
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

Record = TypeVar("Record", bound=msgspec.Struct)

log = logging.getLogger("chairlift.server")

MAX_CACHED = 10_000  # records in memory
# The file may be readable a moment later.
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file, so that a crash leaves the old or the new content."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other threads and processes out of a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@lru_cache(maxsize=1000)
def report_once(path: Path, problem: str) -> None:
    log.error("%s cannot be used and is passed over (%s)", path, problem)


@lru_cache(maxsize=MAX_CACHED)
def _read(path: Path, kind: type[Any], stamp: tuple[int, ...]) -> Any:
    """Read a record; `stamp` changes whenever the file is replaced."""
    return msgspec.json.decode(path.read_bytes(), type=kind)


class RecordFolder(Generic[Record]):
    """All records of one kind and owner, by id."""

    def __init__(self, folder: Path, kind: type[Record]) -> None:
        self.folder = folder
        self._kind = kind

    def save(self, record_id: str, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._path(record_id), msgspec.json.encode(record))

    def find(self, record_id: str) -> Record | None:
        """Return a record; None if there is none, if it cannot be read, or if the id is not one of ours."""
        if not _VALID_ID.fullmatch(record_id):
            return None
        path = self._path(record_id)
        try:
            stat = path.stat()
            record: Record = copy.copy(_read(path, self._kind, (stat.st_mtime_ns, stat.st_ino, stat.st_size)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (msgspec.DecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in TRANSIENT:
                raise
            report_once(path, getattr(error, "strerror", None) or str(error))
            return None
        return record

    def delete(self, record_id: str) -> None:
        self._path(record_id).unlink(missing_ok=True)

    def ids(self) -> list[str]:
        try:
            return [name[: -len(".json")] for name in os.listdir(self.folder) if name.endswith(".json")]
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            report_once(self.folder, error.strerror or str(error))
            return []

    def all(self) -> Iterator[Record]:
        return filter(None, map(self.find, self.ids()))

    def _path(self, record_id: str) -> Path:
        return self.folder / f"{record_id}.json"
