"""Spreads memory over the nodes of a machine with several."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.machine.cores import usable_processors

NODES = Path("/sys/devices/system/node")
DEFAULT, INTERLEAVE = 0, 3  # memory policies of Linux
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
MASK_BITS = 1024


def usable_nodes() -> list[int]:
    """The memory nodes of the usable processors; empty if the system does not say."""
    usable = set(usable_processors())
    nodes = (path for path in NODES.glob("node[0-9]*"))
    return sorted(int(path.name[4:]) for path in nodes if usable & _processors(path))


@contextmanager
def interleaved() -> Iterator[None]:
    """Allocate the pages of this thread in turn on all nodes.

    For weights, which the threads of all nodes read: each then has the bandwidth of all nodes. Threads are not bound to
    cores, because a bound thread cannot evade a busy neighbour.
    """
    nodes = usable_nodes()
    if len(nodes) < 2 or not _set_policy(INTERLEAVE, nodes):
        yield
        return
    try:
        yield
    finally:
        _set_policy(DEFAULT, [])


def _set_policy(policy: int, nodes: list[int]) -> bool:
    """Whether the system took the policy."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None or os.uname().sysname != "Linux":
        return False
    mask = (ctypes.c_ulong * (MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    return int(library.syscall(ctypes.c_long(number), ctypes.c_int(policy), mask, ctypes.c_ulong(MASK_BITS))) == 0


def _processors(node: Path) -> set[int]:
    """Read a list such as 0-3,8."""
    try:
        text = (node / "cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
