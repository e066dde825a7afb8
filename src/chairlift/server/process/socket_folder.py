"""The temporary folder of an engine's sockets, and removal of those that killed front ends left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

SOCKET_NAMES = frozenset({"commands", "reports"})
_PREFIX = "chairlift-"
_NEW_SECONDS = 60.0  # a younger folder may be about to be locked


def make_socket_folder(opened: ExitStack) -> Path:
    """Create a folder that only this user may enter. It stays locked until `opened` is closed, which removes it."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    opened.callback(shutil.rmtree, folder, ignore_errors=True)
    lock = os.open(folder, os.O_RDONLY)
    opened.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder


def remove_stale_folders() -> None:
    """Remove the folders of front ends that were killed: the kernel has released their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or just removed
            _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _NEW_SECONDS:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if {path.name for path in folder.iterdir()} <= SOCKET_NAMES:
            shutil.rmtree(folder)
    finally:
        os.close(lock)
