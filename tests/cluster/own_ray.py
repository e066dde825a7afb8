"""A Ray of a test's own, which shares nothing with another one on the machine."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.running_fleet import processes_of


class OwnRay:
    """The environment for processes that start Ray, and the processes that have it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        own = {"HOME": str(folder), "RAY_TMPDIR": str(folder), "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | own

    def pids(self, title: str = "") -> list[int]:
        """The processes with this environment whose command line begins with `title`, such as "ray::Name"."""
        found = []
        for pid in processes_of(self._folder):
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                    found.append(pid)
        return sorted(found)

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def own_ray() -> Iterator[OwnRay]:
    """A home and a temporary folder for Ray; at the end, all its processes are killed."""
    # Not pytest's folders: their names are too long for Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="chairlift-ray-", dir="/tmp"))
    ray = OwnRay(folder)
    try:
        yield ray
    finally:
        for pid in ray.pids():
            ray.kill(pid)
        shutil.rmtree(folder, ignore_errors=True)
