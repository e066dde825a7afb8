"""CPU time and age of processes, from /proc (Linux)."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cpu_seconds(pid: int) -> float | None:
    """User and system time that a process and its threads have used so far."""
    try:
        # The name, in parentheses, may hold anything; the numbers come after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


class OtherPrograms:
    """The processor time that other processes have used since this object was made, including stolen time."""

    def __init__(self) -> None:
        self._before = _times()

    def share(self) -> float | None:
        """Their share of all processor time; None without /proc."""
        after = _times()
        if self._before is None or after is None:
            return None
        busy, own, total = (now - then for now, then in zip(after, self._before, strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else None


def _times() -> tuple[float, float, float] | None:
    """Processor seconds since the machine started: busy, of this process, and all."""
    own = cpu_seconds(os.getpid())
    try:
        user, nice, system, idle, waiting, *others = map(
            int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    ticks, busy = os.sysconf("SC_CLK_TCK"), user + nice + system + sum(others)
    return None if own is None else (busy / ticks, own, (busy + idle + waiting) / ticks)


def children(pid: int) -> list[int]:
    try:
        lists = [thread.joinpath("children").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for child in " ".join(lists).split()]


def process_age() -> float | None:
    """Seconds since this process was started."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError, AttributeError):
        return None
