"""Limits of the control groups that this process is in, of both versions of their interface."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
FILE_PAGES = re.compile(r"^(?:total_)?((?:in)?active_file) (\d+)$", re.MULTILINE)
NO_LIMIT = 1 << 60  # version 1 writes a number above this instead of "max"


def cpu_quota() -> float:
    """Cores' worth of time per period that the strictest group allows; infinite without a limit."""
    quotas = [math.inf]
    for folder in _groups("cpu"):
        both = _text(folder / "cpu.max").split()  # version 2
        if not both:  # version 1
            both = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(both) == 2 and both[0].isdigit() and both[1].isdigit() and int(both[1]):
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas)


def memory_left(*, mapped: int = 0) -> int | None:
    """Bytes that the strictest group still allows, or None without a limit.

    Files that were read count as used until the memory is needed elsewhere. `mapped` bytes of them are needed here.
    """
    left = [
        found
        for folder in _groups("memory")
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        if (found := _memory_left(folder, limit, used, mapped)) is not None
    ]
    return min(left, default=None)


def _memory_left(folder: Path, limit_file: str, used_file: str, mapped: int) -> int | None:
    limit = _text(folder / limit_file).strip()
    if not limit.isdigit() or int(limit) > NO_LIMIT:
        return None
    used = int(_text(folder / used_file).strip() or 0)
    statistics = dict(FILE_PAGES.findall(_text(folder / "memory.stat")))
    reclaimable = int(statistics.get("inactive_file", 0))
    if mapped:
        reclaimable += int(statistics.get("active_file", 0)) - mapped
    return max(0, int(limit) - used + reclaimable)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the process's groups and of all above them."""
    yield MOUNT
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (MOUNT / controllers, MOUNT / controller) if controllers else (MOUNT,):
            yield mount
            group = mount
            for part in Path(path).parts[1:]:  # a container may see its path on the host, which it has no folder for
                group /= part
                if group.is_dir():
                    yield group


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
