"""The cores, memory nodes, limits and GPUs that this process may use; needs no torch."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from chairlift.errors import InvalidParameter

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


CPUS = Path("/sys/devices/system/cpu")


def usable_processors() -> list[int]:
    """The numbers of the logical processors that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """The cores behind the usable processors: two threads of one core share its arithmetic units."""
    cores = set()
    for processor in usable_processors():
        try:  # All processors of a core have this text in common.
            cores.add((CPUS / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:  # other systems do not say
            cores.add(str(processor))
    return len(cores)


def default_threads() -> int:
    """Threads that compute: one per physical core, as many as the container's limit pays for, and at most
    OMP_NUM_THREADS."""
    allowed = [physical_cores(), math.ceil(min(cpu_quota(), os.cpu_count() or 1))]
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit():
        allowed.append(int(chosen))
    return max(1, min(allowed))


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
    processors: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        processors.update(range(int(first), int(last or first) + 1))
    return processors


def count_gpus() -> int:
    """Return the number of visible CUDA devices; 0 without a driver."""
    driver = _initialized_driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def check_device(device: str) -> None:
    """Raise if `device` is a GPU that this machine does not have."""
    if not device.startswith("cuda"):
        return
    count, index = count_gpus(), int(device.partition(":")[2] or 0)
    if not count:
        raise InvalidParameter("device", "there is no CUDA device here; choose cpu")
    if index >= count:
        raise InvalidParameter("device", f"{device} does not exist; there are {count} CUDA devices, from cuda:0")


def create_context(device: str) -> bool:
    """Create the context of `device` ("auto", "cuda" or "cuda:1") that torch will use in this process.

    False if it is no GPU, there is none here, or torch cannot use it. The driver's calls do not hold the interpreter's
    lock.
    """
    if (device != "auto" and not device.startswith("cuda")) or not _torch_has_cuda():
        return False
    driver = _initialized_driver()
    gpu, context = ctypes.c_int(0), ctypes.c_void_p(None)
    if driver is None or driver.cuDeviceGet(ctypes.byref(gpu), int(device.partition(":")[2] or 0)):
        return False
    return not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def _initialized_driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, without importing it."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders or ())
