"""The limit on open files of this process."""

from __future__ import annotations

import resource

MAX_OPEN_FILES = 65_536


def raise_file_limit() -> None:
    """Raise the limit on file descriptors, usually 1,024: each connection and each mapped array takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
