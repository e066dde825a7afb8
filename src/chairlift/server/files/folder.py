"""The folder of all owners' files and batches."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from chairlift.errors import InvalidParameter
from chairlift.server.files.batch_record import BatchRecord
from chairlift.server.files.file_store import FileStore
from chairlift.server.files.records import RecordFolder

PUBLIC = "public"  # the owner of what clients without a key create


@dataclass(frozen=True, slots=True)
class OwnerFolder:
    """The files and batches of one API key."""

    path: Path
    quota: int

    @property
    def files(self) -> FileStore:
        return FileStore(self.path / "files", self.quota)

    @property
    def batches(self) -> RecordFolder[BatchRecord]:
        return RecordFolder(self.path / "batches", BatchRecord)

    def results(self, batch_id: str) -> Path:
        """The responses of a batch that is not finished yet."""
        return self.path / "batches" / f"{batch_id}.results"


class FilesFolder:
    def __init__(self, path: Path, quota: int) -> None:
        self._path = path
        self._quota = quota
        self._lock: IO[bytes] | None = None
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InvalidParameter("files_dir", f"cannot write {str(path)!r} ({error.strerror})") from None

    def owner(self, key: bytes | None) -> OwnerFolder:
        return OwnerFolder(self._path / (PUBLIC if key is None else key.hex()), self._quota)

    def owners(self) -> Iterator[OwnerFolder]:
        for path in sorted(self._path.iterdir()):
            if path.is_dir():
                yield OwnerFolder(path, self._quota)

    def lock(self) -> bool:
        """Try to become the process that runs the batches of this folder; return whether it is this one."""
        if self._lock is None:
            file = (self._path / ".lock").open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self._lock = file
        return True
