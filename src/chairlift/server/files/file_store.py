"""The files of /v1/files: content and description of each, by owner."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import IO, Any

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.files.records import RecordFolder

PURPOSES = ("batch",)  # that a client may upload for
OUTPUT_PURPOSE = "batch_output"
PIECE = 2**20


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def body(self) -> dict[str, Any]:
        return {"object": "file", "status": "processed", **msgspec.structs.asdict(self)}


class FileStore:
    """The files of one owner."""

    def __init__(self, folder: Path, quota: int) -> None:
        """`quota`: bytes that all files together may have."""
        self._folder = folder
        self._quota = quota
        self._records = RecordFolder(folder, StoredFile)

    def add(
        self,
        source: IO[bytes],
        filename: str,
        purpose: str,
        *,
        file_id: str | None = None,
        expires_at: int | None = None,
    ) -> StoredFile:
        """Copy a file into the store. A file with the same id is replaced."""
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        used, size = sum(file.bytes for file in self._records.all()), 0
        temporary = self.content(f".{file_id}")
        try:
            with temporary.open("wb") as target:
                while piece := source.read(PIECE):
                    size += len(piece)
                    if purpose != OUTPUT_PURPOSE and used + size > self._quota:
                        problem = f"would exceed the limit of {self._quota} bytes for all files; delete some"
                        raise InvalidParameter("file", problem, "quota_exceeded")
                    target.write(piece)
            temporary.replace(self.content(file_id))
        finally:
            temporary.unlink(missing_ok=True)
        now = int(time.time())
        file = StoredFile(
            id=file_id, bytes=size, created_at=now, filename=filename, purpose=purpose, expires_at=expires_at
        )
        self._records.save(file_id, file)
        return file

    def find(self, file_id: str) -> StoredFile | None:
        """Return a file's description. A file whose time has passed is deleted."""
        file = self._records.find(file_id)
        if file is not None and file.expires_at is not None and file.expires_at <= time.time():
            self.delete(file_id)
            return None
        return file

    def all(self) -> list[StoredFile]:
        """Return all files, the newest first."""
        files = (self.find(file.id) for file in self._records.all())
        return sorted(filter(None, files), key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, file_id: str) -> None:
        self._records.delete(file_id)
        self.content(file_id).unlink(missing_ok=True)

    def content(self, file_id: str) -> Path:
        """The path of a file's content, for the id of an existing file."""
        return self._folder / f"{file_id}.content"
