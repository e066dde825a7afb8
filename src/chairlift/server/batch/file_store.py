"""The files of /v1/files: content and description of each, by owner. Descriptions and batches are JSON records in a
folder, one file each, replaced atomically."""

from __future__ import annotations

import copy
import errno
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.wire.errors import too_busy

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


# ---- files -----------------------------------------------------------------------------------------------------------

PURPOSES = ("batch",)  # A client may upload for these.
OUTPUT_PURPOSE = "batch_output"
PIECE = 2**20
STEP = 8 * 2**20  # bytes that an upload of unknown length reserves at a time
MAX_FILES = 10_000  # One owner's; each list reads all descriptions.
MAX_UPLOADS = 16  # One owner's, at a time.
OUTPUT_SECONDS = 30 * 86_400  # A finished batch and its output files are deleted after this, as in OpenAI's API.
LEFTOVER_SECONDS = 3600.0
_CONTENT, _UPLOAD = ".content", ".upload-"


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def body(self) -> dict[str, Any]:
        return {"object": "file", "status": "processed", **msgspec.structs.asdict(self)}

    def is_expired(self, now: float) -> bool:
        # Earlier versions wrote output files without an expiry.
        end = self.created_at + OUTPUT_SECONDS if self.purpose == OUTPUT_PURPOSE else None
        end = end if self.expires_at is None else self.expires_at
        return end is not None and end <= now


class FileStore:
    """The files of one owner."""

    def __init__(self, folder: Path, quota: int) -> None:
        """`quota`: bytes that all files together may have."""
        self.folder = folder
        self.quota = quota
        self._records = RecordFolder(folder, StoredFile)

    def add(
        self,
        pieces: Iterable[bytes],
        filename: str,
        purpose: str,
        *,
        file_id: str | None = None,
        expires_at: int | None = None,
    ) -> StoredFile:
        """Write a file of the server, which may exceed the quota. A file with the same id is replaced."""
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.content(f".{file_id}")
        try:
            with temporary.open("wb") as target:
                target.writelines(pieces)
                size = target.tell()
            return self.keep(temporary, file_id, size, filename, purpose, expires_at)
        finally:
            temporary.unlink(missing_ok=True)

    def keep(
        self, content: Path, file_id: str, size: int, filename: str, purpose: str, expires_at: int | None
    ) -> StoredFile:
        """Make a file of the content in a temporary one."""
        content.replace(self.content(file_id))
        now = int(time.time())
        file = StoredFile(
            id=file_id, bytes=size, created_at=now, filename=filename, purpose=purpose, expires_at=expires_at
        )
        try:
            self._records.save(file_id, file)
        except OSError:
            self.content(file_id).unlink(missing_ok=True)
            raise
        return file

    def find(self, file_id: str) -> StoredFile | None:
        """Return a file's description. A file whose time has passed is deleted."""
        file = self._records.find(file_id)
        if file is not None and file.is_expired(time.time()):
            self.delete(file_id)
            return None
        return file

    def all(self) -> list[StoredFile]:
        """Return all files, the newest first."""
        files = filter(None, map(self.find, self._records.ids()))
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, file_id: str) -> None:
        self._records.delete(file_id)
        self.content(file_id).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove files whose time has passed, and content that a killed server left without a description."""
        known = {file.id for file in self.all()}
        old = time.time() - LEFTOVER_SECONDS
        for path in self.folder.glob(f"[!.]*{_CONTENT}"):
            with suppress(FileNotFoundError):
                if path.name[: -len(_CONTENT)] not in known and path.stat().st_mtime < old:
                    path.unlink()

    def content(self, file_id: str) -> Path:
        """The path of a file's content, for the id of an existing file."""
        return self.folder / f"{file_id}{_CONTENT}"

    def used(self, but: str = "") -> int:
        """Return the bytes of all files and uploads, but not of the one with this name."""
        total = 0
        for entry in self.contents():
            with suppress(FileNotFoundError):  # a file that was deleted meanwhile
                total += 0 if entry.name == but else entry.stat().st_size
        return total

    def contents(self) -> Iterator[os.DirEntry[str]]:
        """The contents of all files and uploads."""
        with os.scandir(self.folder) as entries:
            yield from (entry for entry in entries if entry.name.endswith(_CONTENT))


class Upload:
    """A file that is being uploaded.

    It is a hidden file as long as the room that is reserved for it, so that uploads in other processes see it, and is
    locked while its process lives.
    """

    def __init__(self, store: FileStore, size: int) -> None:
        """Begin an upload of at least `size` bytes."""
        self.size = 0  # bytes that are reserved
        self._store = store
        self._path = store.content(f"{_UPLOAD}{uuid.uuid4().hex}")
        with locked(store.folder):
            others = [entry.name for entry in store.contents()]
            uploads = [store.folder / name for name in others if name.startswith(_UPLOAD)]
            if len(uploads) - sum(map(_remove_if_abandoned, uploads)) >= MAX_UPLOADS:
                raise too_busy(f"{MAX_UPLOADS} uploads are not finished yet; wait for one of them")
            if sum(not name.startswith(".") for name in others) >= MAX_FILES:
                raise InvalidParameter("file", f"{MAX_FILES} files are kept already; delete some", "quota_exceeded")
            self._file: IO[bytes] = self._path.open("xb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self.reserve(max(0, size))
        except BaseException:
            self.close()
            raise

    def reserve(self, size: int, more: int = 0) -> None:
        """Reserve room for `size` bytes in all, and for `more` if there is as much. Raises if the quota is exceeded."""
        with locked(self._store.folder):
            free = self._store.quota - self._store.used(but=self._path.name)
            if size > free:
                problem = f"would exceed the limit of {self._store.quota} bytes for all files; delete some"
                raise InvalidParameter("file", problem, "quota_exceeded")
            self.size = min(size + more, free)
            self._file.truncate(self.size)

    def finish(self, source: IO[bytes], filename: str, purpose: str, expires_at: int | None) -> StoredFile:
        """Make a file of what was uploaded."""
        size = source.seek(0, os.SEEK_END)
        if not size:
            raise InvalidParameter("file", "must not be empty")
        self.reserve(size)
        source.seek(0)
        self._file.writelines(iter(partial(source.read, PIECE), b""))
        self._file.flush()
        return self._store.keep(self._path, f"file-{uuid.uuid4().hex}", size, filename, purpose, expires_at)

    def close(self) -> None:
        """Give back what is reserved, unless it has become a file."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # the disk is full, which was reported
            self._file.close()


def _remove_if_abandoned(upload: Path) -> bool:
    """Remove an upload whose process has exited; return whether it was one."""
    try:
        with upload.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    upload.unlink(missing_ok=True)
    return True
