"""A worker of a batch: a Ray actor that holds an engine and answers shards."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from pathlib import Path

from chairlift import __version__
from chairlift.errors import ChairliftError
from chairlift.server.batch.output import BatchCounts
from chairlift.server.batch.run import BatchResponse, BatchRun, Send
from chairlift.server.batch.send import own_engine
from chairlift.server.batch.shards import Shard
from chairlift.server.config import ServerConfig

LOCK_TIMEOUT = 60.0  # for a worker that was declared dead to end


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
        self._runs: dict[asyncio.Task[None], BatchRun] = {}  # by the task that answers it
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
