"""Runs a batch on the workers of a Ray cluster: one task for each shard.

The driver plans shards as workers become free, and moves the file of each finished shard to the output. A worker that
dies is replaced, and its shards go to others, which continue their files. After the death of the driver, the next run
collects the files that are left.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chairlift import __version__
from chairlift.cluster.ray_runtime import import_ray
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.server.batch.input import SUFFIX, Shard, plan_shards, shard_folder
from chairlift.server.batch.output import BatchCounts, BatchOutput
from chairlift.server.batch.run import BatchResponse, BatchRun, ProgressCallback, Send
from chairlift.server.config import ServerConfig
from chairlift.server.front_end import own_engine

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


LOCK_TIMEOUT = 60.0  # A worker that was declared dead has so long to end.


class BatchWorker:
    """Answers several shards at a time, so that the engine is busy while the last requests of one finish."""

    def __init__(self, config: ServerConfig, concurrency: int, num_threads: int, version: str) -> None:
        if version != __version__:
            raise ChairliftError(f"{socket.gethostname()} has chairlift {__version__}, and the driver {version}")
        # The engine process reads them; Ray sets only the first one.
        os.environ |= {"OMP_NUM_THREADS": str(num_threads), "NUMBA_NUM_THREADS": str(num_threads)}
        self._config = config
        self._concurrency = concurrency
        self._free = asyncio.Semaphore(concurrency)
        self._runs: dict[asyncio.Task[None], BatchRun] = {}  # The keys are the tasks that answer them.
        self._stopping = asyncio.Event()
        self._engine: asyncio.Task[None] | None = None
        self._send: Send | None = None

    async def start(self) -> None:
        """Load the model."""
        started = asyncio.Event()
        self._engine = asyncio.create_task(self._run_engine(started))
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait([self._engine, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._engine.done():
            self._engine.result()

    async def _run_engine(self, started: asyncio.Event) -> None:
        async with own_engine(self._config) as send:
            self._send = send
            started.set()
            await self._stopping.wait()

    async def answer(self, shard: Shard, source: Path, target: Path) -> None:
        """Answer the lines of a shard that have no response in `target`, which exists."""
        if not target.exists():
            problem = f"{socket.gethostname()} does not see {target}"
            raise ChairliftError(f"{problem}: the input and the output must be in a folder that all machines share")
        start = partial(BatchRun, concurrency=self._concurrency, ranges=shard.ranges, lock_timeout=LOCK_TIMEOUT)
        run = await asyncio.to_thread(start, source, target)
        task = asyncio.create_task(run.run(self._send_when_free, lambda _: None))
        self._runs[task] = run
        try:
            await task
        finally:
            del self._runs[task]

    async def _send_when_free(self, path: str, body: bytes) -> BatchResponse:
        assert self._send is not None
        async with self._free:
            return await self._send(path, body)

    async def progress(self) -> BatchCounts:
        """The responses of the shards in work."""
        return sum((run.counts for run in self._runs.values()), BatchCounts())

    async def stop(self) -> None:
        """End the engine process; requests in flight get no response."""
        if runs := list(self._runs):
            for task in runs:
                task.cancel()
            await asyncio.wait(runs)
        self._stopping.set()
        if self._engine is not None:
            await self._engine


SHARDS_PER_WORKER = 2  # The next one begins while the last requests of the one before finish
SHARDS_IN_ALL = 4  # A small batch has this number per worker: faster workers answer more of them.
LINES_PER_SLOT = 4  # A large batch has such shards: its tail is then a small part of it.
POLL_SECONDS = 0.5
STOP_SECONDS = 15.0  # The engines have so long to end by themselves.
MAX_DEATHS = 3  # Deaths in a row, while workers start or with a shard that makes no progress.


@dataclass(slots=True)
class _Worker:
    actor: Any
    starting: Any  # reference to the end of its start; None when it is ready
    num_failed_starts: int  # Starts in a row that failed before this one.
    shards: dict[Any, Shard] = field(default_factory=dict)  # The keys are the references to their ends.


@dataclass(slots=True)
class _Deaths:
    """How often workers died in a row with a shard whose file did not grow."""

    count: int = 0
    file_size: int = 0


class RayBatch:
    """The driver of a batch; Ray is connected."""

    def __init__(
        self,
        run: BatchRun,
        config: ServerConfig,
        resources: WorkerResources,
        concurrency: int,
        worker_class: type[BatchWorker] = BatchWorker,
    ) -> None:
        """`concurrency` is the number of requests in flight at each worker."""
        self._ray = import_ray()
        self._run = run
        self._config = config
        self._concurrency = concurrency
        self._source, self._target = run.source.resolve(), run.output.path.resolve()
        self._name = uuid.uuid4().hex[:8]  # A worker of an earlier run never writes the file of a new shard.
        left = run.total - run.done_before
        self._num_workers = min(resources.num_workers, left)
        num_lines = -(-left // (SHARDS_IN_ALL * max(1, self._num_workers)))
        num_lines = max(1, min(num_lines, LINES_PER_SLOT * concurrency))
        self._plan: Iterator[Shard] = plan_shards(run.source, run.output.done, num_lines)
        self._again: deque[Shard] = deque()  # shards whose worker died
        self._deaths: dict[int, _Deaths] = {}  # The keys are numbers of shards.
        self._merged = BatchCounts()
        self._workers: list[_Worker] = []
        # An asynchronous actor: shards share its event loop, and its progress can be read meanwhile.
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_concurrency": SHARDS_PER_WORKER + 2}
        self._actor_class = self._ray.remote(worker_class).options(**options)
        self._num_threads = resources.cpus

    def run(self, on_progress: ProgressCallback) -> None:
        """Answer all lines without a response."""
        shard_folder(self._target).mkdir(exist_ok=True)
        try:
            for _ in range(self._num_workers):
                self._add_worker()
            while self._assign():
                self._wait()
                self._run.counts = self._merged + self._progress()
                on_progress(self._run)
            self._run.collect_shards()  # removes the folder
        finally:
            self._stop()

    def _add_worker(self, num_failed_starts: int = 0) -> None:
        actor = self._actor_class.remote(self._config, self._concurrency, self._num_threads, __version__)
        self._workers.append(_Worker(actor, actor.start.remote(), num_failed_starts))

    def _assign(self) -> bool:
        """Give shards to workers that are ready; return whether any are in work or left."""
        left = True
        for worker in self._workers:
            while left and worker.starting is None and len(worker.shards) < SHARDS_PER_WORKER:
                shard = self._again.popleft() if self._again else next(self._plan, None)
                if shard is None:
                    left = False
                    break
                path = self._path(shard)
                path.touch()
                worker.shards[worker.actor.answer.remote(shard, self._source, path)] = shard
        return left or any(worker.shards for worker in self._workers)

    def _path(self, shard: Shard) -> Path:
        return shard_folder(self._target) / f"{self._name}-{shard.number}{SUFFIX}"

    def _wait(self) -> None:
        """Wait until a worker is ready or a shard is finished, or for the next look at the progress."""
        references = {reference: worker for worker in self._workers for reference in worker.shards}
        references |= {worker.starting: worker for worker in self._workers if worker.starting is not None}
        for reference in self._ray.wait(list(references), timeout=POLL_SECONDS)[0]:
            worker = references[reference]
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, EngineDead) and worker.starting is None:
                    self._replace(worker, error.cause)  # its machine may be the cause
                    continue
                if isinstance(error.cause, ChairliftError):
                    raise error.cause from None
                raise
            except self._ray.exceptions.RayError as error:
                self._replace(worker, error)
            else:
                if reference == worker.starting:
                    worker.starting = None
                else:
                    self._merge(worker.shards.pop(reference))

    def _replace(self, worker: _Worker, error: Exception) -> None:
        """Start another worker for one that died."""
        self._workers.remove(worker)
        self._ray.kill(worker.actor)  # it may only be out of reach
        num_failed = 0 if worker.starting is None else worker.num_failed_starts + 1
        if num_failed >= MAX_DEATHS:
            raise ChairliftError(f"{num_failed} workers in a row died while they started: {error}")
        for shard in worker.shards.values():
            deaths = self._deaths.setdefault(shard.number, _Deaths())
            size = self._path(shard).stat().st_size
            deaths.count = deaths.count + 1 if size == deaths.file_size else 1
            deaths.file_size = size
            if deaths.count >= MAX_DEATHS:
                raise ChairliftError(f"{deaths.count} workers in a row died with the same requests: {error}")
        self._again.extend(worker.shards.values())
        self._add_worker(num_failed)

    def _merge(self, shard: Shard) -> None:
        self._merged += self._run.output.take_over(BatchOutput(self._path(shard)))
        self._deaths.pop(shard.number, None)

    def _progress(self) -> BatchCounts:
        """The responses of the shards in work, as far as workers tell at once."""
        asked = [worker.actor.progress.remote() for worker in self._workers if worker.shards]
        counts = BatchCounts()
        for reference in self._ray.wait(asked, num_returns=len(asked), timeout=POLL_SECONDS)[0] if asked else ():
            try:
                counts += self._ray.get(reference)
            except self._ray.exceptions.RayError:
                continue  # it died, which the next `_wait` finds
        return counts

    def _stop(self) -> None:
        stopping = [worker.actor.stop.remote() for worker in self._workers if worker.starting is None]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
        for worker in self._workers:
            self._ray.kill(worker.actor)
