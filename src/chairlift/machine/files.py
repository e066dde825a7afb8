"""Folders and files that no other user of this machine can change, for what would run code or be overwritten; and how
many files may be open.

The rules are those of ssh for its keys: each folder of the path belongs to this user or to root, and others may not
write to it, unless it is sticky, as /tmp is, where they cannot rename what belongs to this user. A group may write if
this user and root are its only members.
"""

from __future__ import annotations

import grp
import os
import pwd
import resource
import stat
from pathlib import Path

from chairlift.errors import InvalidParameter

ROOT = 0


def private_folder(path: Path) -> Path:
    """Create a folder where it is missing and return its real path; raises OSError if another user can change it."""
    real = path.expanduser().resolve()
    for part in reversed((real, *real.parents)):
        if not part.exists():
            part.mkdir(mode=0o700 if part == real else 0o755, exist_ok=True)
        status = part.stat()
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        _require_private(part, status, writable_by_others=is_sticky and part != real)
    return real


def require_private_content(folder: Path) -> None:
    """Raise OSError if the folder holds, at any depth, a file of another user, one that others can write, or a link."""
    hidden = not folder.stat().st_mode & 0o077  # others do not reach what is in it
    for entry in os.scandir(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # a temporary file of another process
            continue
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise _refusal(Path(entry.path), "is neither a file nor a folder")
        _require_private(Path(entry.path), status, writable_by_others=hidden)
        if stat.S_ISDIR(status.st_mode):
            require_private_content(Path(entry.path))


def open_private(path: Path) -> int:
    """Open a file to read it; raises OSError if it is a link, or if another user owns it or can write it."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is not a file")
        _require_private(path, status)
    except BaseException:
        os.close(file)
        raise
    return file


def create_private(path: Path) -> int:
    """Create a file that only this user can read and write; one that this user left there before is replaced."""
    try:
        status = path.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is a link, or belongs to another user")
        path.unlink()
    except FileNotFoundError:
        pass
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _require_private(path: Path, status: os.stat_result, *, writable_by_others: bool = False) -> None:
    if status.st_uid not in (ROOT, os.geteuid()):
        raise _refusal(path, "belongs to another user")
    if writable_by_others:
        return
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _only_own(status.st_gid)):
        raise _refusal(path, "can be written by other users")


def _only_own(group: int) -> bool:
    """Whether this user and root are the only members of a group."""
    try:
        names = set(grp.getgrgid(group).gr_mem)
    except KeyError:  # a group without a name, as in a container
        names = set()
    others = [user for user in pwd.getpwall() if user.pw_uid not in (ROOT, os.geteuid())]
    return not any(user.pw_gid == group or user.pw_name in names for user in others)


def _refusal(path: Path, problem: str) -> PermissionError:
    return PermissionError(f"{path} {problem}")


MAX_OPEN_FILES = 65_536
RESERVED_FILES = 32  # a server has about 20 open without connections, and 6 more while its engine restarts
RESERVED_SHARE = 1 / 8  # Left for uploads, batches and connections that are being closed.
FEWEST = 8  # connections with which a server is of use


def raise_file_limit() -> None:
    """Raise the limit on file descriptors, usually 1,024: each connection and each mapped array takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def file_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def connection_limit(asked: int | None, files_each: int = 1) -> int:
    """Return how many connections a process may have; `asked` is what the user wants, `files_each` are the file
    descriptors that one needs."""
    files = file_limit()
    room = int((files - files * RESERVED_SHARE - RESERVED_FILES) / files_each)
    if room < (asked or FEWEST):
        problem = f"the limit of {files} open files leaves room for {max(0, room)} connections; raise it with ulimit -n"
        raise InvalidParameter("max_connections", problem)
    return room if asked is None else asked
