"""JSON records in a folder, one file each, replaced atomically."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Record = TypeVar("Record", bound=msgspec.Struct)

log = logging.getLogger("chairlift.server")

_VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file, so that a crash leaves the old or the new content."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@lru_cache(maxsize=1000)
def _report_once(path: Path, problem: str) -> None:
    log.error("%s is damaged and ignored (%s)", path, problem)


class RecordFolder(Generic[Record]):
    """All records of one kind and owner, by id."""

    def __init__(self, folder: Path, kind: type[Record]) -> None:
        self.folder = folder
        self._kind = kind

    def save(self, record_id: str, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._path(record_id), msgspec.json.encode(record))

    def find(self, record_id: str) -> Record | None:
        """Return a record; None if there is none, if it is damaged, or if the id is not one of ours."""
        if not _VALID_ID.fullmatch(record_id):
            return None
        try:
            return msgspec.json.decode(self._path(record_id).read_bytes(), type=self._kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            _report_once(self._path(record_id), str(error))
            return None

    def delete(self, record_id: str) -> None:
        self._path(record_id).unlink(missing_ok=True)

    def ids(self) -> Iterator[str]:
        return (path.stem for path in self.folder.glob("*.json")) if self.folder.exists() else iter(())

    def all(self) -> Iterator[Record]:
        return filter(None, map(self.find, self.ids()))

    def _path(self, record_id: str) -> Path:
        return self.folder / f"{record_id}.json"
