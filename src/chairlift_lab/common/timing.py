"""Time and peak memory of a function, how they grow with its input, and the processor time of processes (Linux)."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch


P = ParamSpec("P")
R = TypeVar("R")
TimedCall = Callable[[], object]

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what Linux wants written to clear_refs


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run the function without gradients."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        with torch.inference_mode():
            return function(*args, **kwargs)

    return run


def best_seconds(run: TimedCall, device: torch.device, *, least: float = 0.25, repeats: int = 7) -> float:
    """The fastest of at least `repeats` runs that together take at least `least` seconds, after one uncounted run.

    The minimum, because disturbances only ever make a run slower.
    """
    _timed(run, device)
    times: list[float] = []
    while len(times) < repeats or sum(times) < least:
        times.append(_timed(run, device))
    return min(times)


def _timed(run: TimedCall, device: torch.device) -> float:
    _finish(device)
    start_time = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - start_time


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def peak_bytes(run: TimedCall, device: torch.device) -> int | None:
    """Peak memory during `run` beyond what was in use before; None if the system cannot measure it."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _CLEAR_REFS.exists():
        return None
    # Memory that the C library keeps free would be reused without counting as new.
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK)
    before = _peak_of_process()
    run()
    return _peak_of_process() - before


def _peak_of_process() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent k of values ~ sizes^k: the slope of a log-log fit."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y, strict=True))
    return covariance / sum((one - mean_x) ** 2 for one in x)


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
