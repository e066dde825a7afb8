"""The cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from chairlift.machine.cgroup import cpu_quota

CPUS = Path("/sys/devices/system/cpu")


def usable_processors() -> list[int]:
    """The numbers of the logical processors that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """The cores behind the usable processors: two threads of one core share its arithmetic units."""
    return len({_siblings(processor) for processor in usable_processors()})


def _siblings(processor: int) -> str:
    """A text that all processors of a core have in common."""
    try:
        return (CPUS / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:  # other systems do not say
        return str(processor)


def default_threads() -> int:
    """Threads that compute: one per physical core, as many as the container's limit pays for, and at most
    OMP_NUM_THREADS."""
    allowed = [physical_cores(), math.ceil(min(cpu_quota(), os.cpu_count() or 1))]
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit():
        allowed.append(int(chosen))
    return max(1, min(allowed))
