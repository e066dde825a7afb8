"""Where parts of blocks are kept: in host memory, or as files of a folder.

    FOLDER/key                            32 random bytes, which sign every file
    FOLDER/lock                           held by the process that uses the folder
    FOLDER/<fingerprint>/about.json       the model and all that its keys and values depend on
    FOLDER/<fingerprint>/ab/<digest>.kv   one part: a header, its bytes, and a signature over both

A file is written under another name and renamed, so it is complete or absent. It may still be damaged, cut off or made
by someone else: without a valid signature it is a miss and removed. All files are readable by their owner only. The
name and size of a file are the whole index, so it survives what the files survive.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from chairlift.core.kv.tiers import PartKey, StoredPart
from chairlift.errors import InvalidParameter
from chairlift.machine.files import create_private, open_private, private_folder

log = logging.getLogger("chairlift")

Data = bytes | bytearray | memoryview

MAGIC = b"chairlift-kv-1\0\0"
HEADER = struct.Struct("<16s32s32s8sQ")  # magic, fingerprint, digest, part, number of bytes
SIGNATURE_BYTES = 32
OVERHEAD = HEADER.size + SIGNATURE_BYTES
PARTIAL = ".partial"
PIECE = 1 << 16  # bytes of a file that are read at once where its length is not known to be right
_NAME = re.compile(r"([0-9a-f]{64})\.([a-z0-9]{1,8})")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class PartStore(ABC):
    """Keeps parts of blocks under their keys."""

    @abstractmethod
    def put(self, key: PartKey, data: Data) -> None:
        """Keep a part; raises OSError if that is not possible."""

    @abstractmethod
    def get(self, key: PartKey) -> Data | None:
        """The bytes of a part as they were put; None if it is not there or damaged."""

    @abstractmethod
    def contains(self, key: PartKey) -> bool:
        """Whether there is something under this key, which may still be damaged."""

    @abstractmethod
    def evict(self, key: PartKey) -> None:
        """Remove a part, if it is there."""


class HostStore(PartStore):
    """Keeps parts in the memory of this process."""

    def __init__(self) -> None:
        self._parts: dict[PartKey, Data] = {}

    def put(self, key: PartKey, data: Data) -> None:
        self._parts[key] = data

    def get(self, key: PartKey) -> Data | None:
        return self._parts.get(key)

    def contains(self, key: PartKey) -> bool:
        return key in self._parts

    def evict(self, key: PartKey) -> None:
        self._parts.pop(key, None)


class PartFile(NamedTuple):
    """A file of a folder, by its name and size alone."""

    path: Path
    key: PartKey
    num_bytes: int  # The size of the whole file.
    used: float  # when it was last used, in seconds since 1970


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files of one fingerprint."""

    fingerprint: str
    about: Mapping[str, Any]
    files: Sequence[PartFile]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class DiskStore(PartStore):
    """Keeps parts as files of one folder, which no other process uses meanwhile."""

    def __init__(self, folder: Path, num_bytes: int, about: Mapping[str, Any], part_bytes: Mapping[str, int]) -> None:
        """`num_bytes`: the limit of all files together; `about`: all that parts depend on besides their keys."""
        self._part_bytes = part_bytes
        self._limit = num_bytes
        self._changes = Lock()  # Two threads write, read and remove files.
        try:
            self._root = private_folder(folder)
            self._root.chmod(0o700)
            self._lock = _lock(self._root)
        except OSError as error:
            raise InvalidParameter("kv_disk", str(error)) from None
        self.fingerprint = fingerprint(about)
        self._folder = self._root / self.fingerprint
        try:
            self._secret = _read_secret(self._root)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _write_private(self._folder / "about.json", json.dumps(about, indent=1, default=str).encode())
        except OSError as error:
            self.close()
            raise InvalidParameter("kv_disk", str(error)) from None
        others = list[PartFile]()
        self._own: dict[PartKey, int] = {}
        self._used = 0
        self.found: list[StoredPart] = []  # parts of an earlier run, the one used longest ago first
        for model in scan(self._root, remove_partial=True):
            if model.fingerprint != self.fingerprint:
                others += model.files
                continue
            for file in sorted(model.files, key=lambda file: file.used):
                expected = part_bytes.get(file.key.part)
                if expected is None or file.num_bytes != expected + OVERHEAD:
                    _remove(file.path)
                    continue
                self._own[file.key] = file.num_bytes
                self.found.append(StoredPart(file.key, file.num_bytes))
        self._others = sorted(others, key=lambda file: -file.used)  # The last one is removed first.
        self._other_digests = {file.key.digest for file in others}
        self._used = sum(self._own.values()) + sum(file.num_bytes for file in others)

    def of_other_models(self, digest: bytes) -> bool:
        """Whether the folder has a block with the same tokens that another model, or another version, computed."""
        return digest in self._other_digests

    def put(self, key: PartKey, data: Data) -> None:
        size = len(data) + OVERHEAD
        self._make_room(size)
        path = self._path(key)
        partial = path.with_name(path.name + PARTIAL)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        header = self._header(key, len(data))
        try:
            file = create_private(partial)
            try:
                for piece in (header, data, self._sign(header, data)):
                    _write_all(file, memoryview(piece))
            finally:
                os.close(file)
            partial.replace(path)
        except OSError:
            _remove(partial)
            raise
        with self._changes:
            self._used += size - self._own.get(key, 0)
            self._own[key] = size

    def get(self, key: PartKey) -> Data | None:
        path = self._path(key)
        try:
            data = self._read(path, key)
        except OSError as error:
            log.debug(f"tier       {path}: {error}")
            data = None
        if data is None:
            self.evict(key)
        else:
            with suppress(OSError):
                os.utime(path)
        return data

    def contains(self, key: PartKey) -> bool:
        return key in self._own

    def evict(self, key: PartKey) -> None:
        with self._changes:
            self._used -= self._own.pop(key, 0)
            _remove(self._path(key))

    def _make_room(self, size: int) -> None:
        """Remove files of other models, those used longest ago first, as far as the limit asks for it."""
        with self._changes:
            while self._used + size > self._limit and self._others:
                other = self._others.pop()
                self._used -= other.num_bytes
                _remove(other.path)

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self._lock)

    def _path(self, key: PartKey) -> Path:
        name = key.digest.hex()
        return self._folder / name[:2] / f"{name}.{key.part}"

    def _header(self, key: PartKey, num_bytes: int) -> bytes:
        return HEADER.pack(MAGIC, bytes.fromhex(self.fingerprint), key.digest, key.part.encode(), num_bytes)

    def _read(self, path: Path, key: PartKey) -> Data | None:
        content = _read_file(path, self._part_bytes[key.part] + OVERHEAD)
        if content is None:
            return None
        data = content[HEADER.size : -SIGNATURE_BYTES]
        header = self._header(key, len(data))
        if content[: HEADER.size] != header:
            return None
        return data if hmac.compare_digest(self._sign(header, data), content[-SIGNATURE_BYTES:]) else None

    def _sign(self, header: bytes, data: Data) -> bytes:
        return _signature(self._secret, header, hashlib.sha256(data))


def fingerprint(about: Mapping[str, Any]) -> str:
    """A hash of all that keys and values depend on besides the tokens."""
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


# ---- the files of a folder, for stores and for `chairlift cache` ----------------------------------------------------


def scan(root: Path, *, remove_partial: bool = False) -> Iterator[ModelFolder]:
    """The parts of all models in a folder; names that are not ours are left alone."""
    for model in sorted(root.iterdir()):
        if not _FINGERPRINT.fullmatch(model.name) or model.is_symlink() or not model.is_dir():
            continue
        files = list[PartFile]()
        for folder in os.scandir(model):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                files += _part_files(folder.path, remove_partial)
        yield ModelFolder(model.name, _read_about(model / "about.json"), files)


def _part_files(folder: str, remove_partial: bool) -> Iterator[PartFile]:
    for entry in os.scandir(folder):
        if remove_partial and entry.name.endswith(PARTIAL):
            _remove(Path(entry.path))
            continue
        name = _NAME.fullmatch(entry.name)
        if name is None or not entry.is_file(follow_symlinks=False):
            continue
        with suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            key = PartKey(bytes.fromhex(name[1]), name[2])
            yield PartFile(Path(entry.path), key, status.st_size, status.st_mtime)


def is_intact(file: PartFile, model: str, secret: bytes) -> bool:
    """Whether a file has the content that its name says, signed with the key of its folder."""
    left = file.num_bytes - OVERHEAD
    if left < 0:
        return False
    header = HEADER.pack(MAGIC, bytes.fromhex(model), file.key.digest, file.key.part.encode(), left)
    digest = hashlib.sha256()
    try:
        with os.fdopen(open_private(file.path), "rb") as content:
            if content.read(HEADER.size) != header:
                return False
            while left:  # It may be larger than memory, whatever it is.
                piece = content.read(min(left, PIECE))
                if not piece:
                    return False
                digest.update(piece)
                left -= len(piece)
            signature = content.read(SIGNATURE_BYTES + 1)
    except OSError:
        return False
    return hmac.compare_digest(_signature(secret, header, digest), signature)


def open_folder(root: Path) -> tuple[int, bytes]:
    """Lock a folder that exists and read its key; raises InvalidParameter if it is none of ours or in use."""
    if not (root / "key").is_file():
        raise InvalidParameter("folder", f"{root} is no folder of a KV cache")
    try:
        return _lock(root), _read_secret(root)
    except OSError as error:
        raise InvalidParameter("folder", str(error)) from None


def _lock(root: Path) -> int:
    file = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise BlockingIOError(f"{root} is in use by another process") from None
    return file


def _read_secret(root: Path) -> bytes:
    """The key of a folder; a new one if there is none, with which older files are not valid."""
    path = root / "key"
    with suppress(FileNotFoundError):
        known = _read_file(path, 32)
        if known is not None and not path.stat().st_mode & 0o077:
            return bytes(known)
    secret = secrets.token_bytes(32)
    _write_private(path, secret)
    return secret


def _write_private(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + PARTIAL)
    file = create_private(partial)
    try:
        _write_all(file, memoryview(data))
    finally:
        os.close(file)
    partial.replace(path)


def _read_about(path: Path) -> Mapping[str, Any]:
    try:
        with os.fdopen(open_private(path), "rb") as file:
            about = json.loads(file.read(PIECE))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _read_file(path: Path, num_bytes: int) -> memoryview | None:
    """All of a private file of this length; None if it has another one."""
    file = open_private(path)
    try:
        if os.fstat(file).st_size != num_bytes:
            return None
        content = memoryview(bytearray(num_bytes))
        start = 0
        while start < num_bytes:
            count = os.readv(file, [content[start:]])
            if count == 0:
                return None
            start += count
        return content
    finally:
        os.close(file)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _signature(secret: bytes, header: bytes, digest: hashlib._Hash) -> bytes:
    """The signature of a part, given its header and the hash of its bytes."""
    return hmac.digest(secret, header + digest.digest(), "sha256")


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
