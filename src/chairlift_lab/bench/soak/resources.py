"""Memory, file descriptors and threads of a server's processes over time, from /proc (Linux)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from chairlift_lab.common.cpu_time import children

FEW = 4  # file descriptors or threads that may be added: pools start threads lazily


@dataclass(frozen=True, slots=True)
class ProcessSample:
    memory: int  # resident bytes
    files: int
    threads: int


def process_sample(pid: int) -> ProcessSample:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(fields["VmRSS"].split()[0]) * 1024
    return ProcessSample(memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def server_processes(pid: int) -> dict[str, int]:
    """The front end and the engine of a server, by role."""
    found = {"front end": pid}
    for child in children(pid):
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            found["engine"] = child
    return found


def fleet_processes(ingress: int, replicas: Sequence[int]) -> dict[str, int]:
    """The ingress of a fleet and the front end and engine of each replica, by role; given the pids of their servers."""
    found = {"ingress": ingress}
    for number, replica in enumerate(sorted(replicas), start=1):
        found |= {f"{role} {number}": pid for role, pid in server_processes(replica).items()}
    return found


def memory_growth(samples: Sequence[ProcessSample]) -> int:
    """Bytes that the last fifth of the samples has more than the second one; the first is for warming up."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples[:1], samples[-fifth:]
    return round(mean(one.memory for one in late) - mean(one.memory for one in early))


def growth_problems(
    role: str, idle_before: ProcessSample, idle_after: ProcessSample, growth: int, tolerance: int
) -> list[str]:
    """What grew: memory during the traffic, file descriptors and threads from before to after it."""
    found = []
    if growth > tolerance:
        found.append(f"the {role}'s memory grew by {growth / 2**20:.1f} MiB")
    for what in ("files", "threads"):
        before, after = getattr(idle_before, what), getattr(idle_after, what)
        if after > before + FEW:
            found.append(f"the {role} had {before} {what} before and {after} after the traffic")
    return found
