"""The limit on open files of this process."""

from __future__ import annotations

import resource

from chairlift.errors import InvalidParameter

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
