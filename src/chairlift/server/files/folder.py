"""The folder of all owners' files and batches."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from chairlift.errors import InvalidParameter
from chairlift.server.files.batch_record import BatchRecord, BatchStatus
from chairlift.server.files.file_store import FileStore
from chairlift.server.files.records import RecordFolder

LEFTOVER_SECONDS = 3600.0
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

    def find_batch(self, batch_id: str) -> BatchRecord | None:
        """Return a batch, with the status that it has since a client cancelled it."""
        batch = self.batches.find(batch_id)
        return None if batch is None else self._with_cancellation(batch)

    def all_batches(self) -> Iterator[BatchRecord]:
        return map(self._with_cancellation, self.batches.all())

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch by a file of its own: the process that runs the batch writes its record."""
        self._cancellation(batch_id).touch()

    def is_cancelled(self, batch_id: str) -> bool:
        return self._cancellation(batch_id).exists()

    def _with_cancellation(self, batch: BatchRecord) -> BatchRecord:
        if not batch.status.is_final and batch.status is not BatchStatus.CANCELLING and self.is_cancelled(batch.id):
            batch.enter(BatchStatus.CANCELLING, self._cancellation(batch.id).stat().st_mtime)
        return batch

    def _cancellation(self, batch_id: str) -> Path:
        return self.path / "batches" / f"{batch_id}.cancelled"

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
            self._remove_leftovers()
        return True

    def _remove_leftovers(self) -> None:
        """Remove temporary files of uploads and records that a killed server did not finish."""
        old = time.time() - LEFTOVER_SECONDS
        for path in self._path.glob("*/*/.*"):
            if path.stat().st_mtime < old:  # other processes may be writing newer ones
                path.unlink(missing_ok=True)
