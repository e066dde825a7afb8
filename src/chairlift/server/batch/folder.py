"""The folder of all owners' files and batches, and the state of each batch."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.batch.file_store import LEFTOVER_SECONDS, OUTPUT_SECONDS, FileStore, RecordFolder, report_once


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class BatchRecord(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_seconds: int = OUTPUT_SECONDS  # The output files are deleted this long after they are written.
    problem: str | None = None  # why the whole batch failed
    metadata: dict[str, str] | None = None
    key: bytes | None = None  # digest of the API key that created it
    tenant: str | None = None

    def enter(self, status: BatchStatus, now: float) -> None:
        """Change the status and note when."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now))

    def is_expired(self, now: float) -> bool:
        """Whether it need not be kept any longer."""
        ends = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        ended = max((end for end in ends if end is not None), default=self.expires_at)
        return self.status.is_final and ended + OUTPUT_SECONDS <= now

    def body(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
        for name in ("key", "tenant", "output_seconds"):
            del fields[name]
        error = {"code": "invalid_file", "message": fields.pop("problem"), "param": "input_file_id", "line": None}
        errors = None if self.problem is None else {"object": "list", "data": [error]}
        return {"object": "batch", **fields, "errors": errors, "request_counts": counts}


PUBLIC = "public"  # the owner of what clients without a key create
_OWNER = re.compile(rf"{PUBLIC}|[0-9a-f]+")  # It may be the digest of a key.


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

    def remove_expired(self) -> None:
        """Remove the files and the finished batches whose time has passed."""
        self.files.remove_expired()
        now = time.time()
        for batch in self.batches.all():
            if batch.is_expired(now):
                self.remove_batch(batch.id)

    def remove_batch(self, batch_id: str) -> None:
        """Remove a finished batch. Its output files have an expiry of their own."""
        self.batches.delete(batch_id)
        self._cancellation(batch_id).unlink(missing_ok=True)
        self.results(batch_id).unlink(missing_ok=True)

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch by a file of its own: the process that runs the batch writes its record."""
        self._cancellation(batch_id).touch()

    def _with_cancellation(self, batch: BatchRecord) -> BatchRecord:
        cancellation = self._cancellation(batch.id)
        if not batch.status.is_final and batch.status is not BatchStatus.CANCELLING and cancellation.exists():
            batch.enter(BatchStatus.CANCELLING, cancellation.stat().st_mtime)
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

    def owners(self) -> list[OwnerFolder]:
        """The folders that belong to an owner; others, such as lost+found, are not touched."""
        with os.scandir(self._path) as entries:
            names = sorted(entry.name for entry in entries if _OWNER.fullmatch(entry.name) and entry.is_dir())
        return [OwnerFolder(self._path / name, self._quota) for name in names]

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

    def remove_expired(self) -> None:
        """Remove what need not be kept any longer."""
        self._remove_leftovers()
        for owner in self.owners():
            try:
                owner.remove_expired()
            except OSError as error:
                report_once(owner.path, error.strerror or str(error))

    def _remove_leftovers(self) -> None:
        """Remove temporary files of uploads and records that a killed server did not finish."""
        old = time.time() - LEFTOVER_SECONDS
        for path in (path for owner in self.owners() for path in owner.path.glob("*/.*")):
            with suppress(OSError):
                # Other processes may be writing newer ones.
                if path.name != ".lock" and path.stat().st_mtime < old:
                    path.unlink(missing_ok=True)
