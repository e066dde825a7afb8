"""What a worker of a batch asks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chairlift.errors import InvalidParameter

Node = Mapping[str, float]
"""Resources of a machine, as Ray names them: CPU, GPU and others."""


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """How many workers there are, and what each gets."""

    num_workers: int
    cpus: int
    gpus: float

    def num_fitting(self, nodes: Sequence[Node]) -> int:
        """How many of the workers fit on these machines, if they run nothing else."""
        return min(self.num_workers, sum(_num_fitting(node, self.cpus, self.gpus) for node in nodes))

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return f"{self.cpus} CPU{'s' * (self.cpus != 1)}{gpus}"


def choose_resources(
    nodes: Sequence[Node], device: str, workers: int | None, cpus: int | None, gpus: float | None
) -> WorkerResources:
    """Fill in what was not given: a worker for each GPU, or for each machine without GPUs, and all of their CPUs."""
    if device.startswith("cuda:"):
        raise InvalidParameter("device", f"Ray chooses the GPU of each worker; give cuda instead of {device}")
    if gpus is not None and (gpus > 0) == (device == "cpu"):
        raise InvalidParameter("worker_gpus", f"{gpus:g} does not fit the device {device}")
    if gpus is None:
        has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
        if device == "cuda" and not has_gpus:
            raise InvalidParameter("device", "no machine of the Ray cluster has a GPU")
        gpus = 1.0 if has_gpus and device != "cpu" else 0.0
    if workers is None:
        workers = max(1, sum(_num_fitting(node, 1, gpus) if gpus else node.get("CPU", 0) >= 1 for node in nodes))
    if cpus is None:
        cpus = 1 if gpus else _most_cpus(nodes, workers)
    return WorkerResources(workers, cpus, gpus)


def _num_fitting(node: Node, cpus: float, gpus: float) -> int:
    return int(min(node.get(name, 0) / amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount))


def _most_cpus(nodes: Sequence[Node], workers: int) -> int:
    """The largest number of CPUs per worker with which all workers fit."""
    most = max((int(node.get("CPU", 0)) for node in nodes), default=1)
    fitting = (cpus for cpus in range(most, 0, -1) if sum(_num_fitting(node, cpus, 0) for node in nodes) >= workers)
    return next(fitting, 1)
