"""Runs the batches of a folder below interactive traffic, and continues them after a restart.

A line is sent only while at least a quarter of the engine's slots is free, so that interactive requests find room. Of
each owner one batch runs at a time, the oldest first. One process of those that share the folder does this: the
one that has its lock.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from chairlift.errors import ChairliftError, StorageFull, is_full
from chairlift.server.access import KeyTable
from chairlift.server.batch.file_store import OUTPUT_PURPOSE
from chairlift.server.batch.folder import BatchRecord, BatchStatus, FilesFolder, OwnerFolder
from chairlift.server.batch.output import is_answered
from chairlift.server.batch.run import BatchResponse, BatchRun, call
from chairlift.server.http.routes import Service
from chairlift.server.process.engine_client import EngineState

log = logging.getLogger("chairlift.server")

POLL_SECONDS = 0.5  # The folder is read this often, since other processes may have changed it.
WAIT_SECONDS = 0.02  # The engine is asked this often while it has no room.
FREE_SHARE = 0.25  # This share of the engine's slots stays free for interactive requests.
PAUSE_SECONDS = 60.0  # A batch that could not be written is continued after this.
SWEEP_SECONDS = 600.0  # What has expired is removed this often.
MIN_FREE_BYTES = 16 * 2**20  # A batch begins only if the disk has as many.
MAX_LINES = 50_000  # A batch has no more, as in OpenAI's API; they are in memory.


class BatchRunner:
    def __init__(self, folder: FilesFolder, service: Service, app: FastAPI, keys: KeyTable) -> None:
        """`app` answers requests without checking keys, but applies their limits."""
        self._folder = folder
        self._service = service
        self._app = app
        self._keys = keys
        self._num_sent = 0  # lines without a response
        # By owner and id: a copied folder has the same ids again.
        self._running: dict[tuple[Path, str], asyncio.Task[None]] = {}
        self._finished: set[tuple[Path, str]] = set()  # batches that need not be read again
        self._paused: dict[tuple[Path, str], float] = {}  # when batches may be continued that could not be written
        self._next_sweep = 0.0
        self._problem = ""  # It is the problem with the folder that was logged last.

    async def run(self) -> None:
        """Run batches until cancelled; what is not finished continues at the next start."""
        try:
            while True:
                try:
                    if await asyncio.to_thread(self._folder.lock):
                        await self._look()
                    self._problem = ""
                except Exception as error:  # such as no file descriptors, for a while
                    if self._problem != (problem := f"{type(error).__name__}: {error}"):
                        log.exception("the folder of batches cannot be read")
                    self._problem = problem
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look(self) -> None:
        """Start batches that are new or were interrupted, and cancel those that clients have cancelled."""
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_SECONDS
            await asyncio.to_thread(self._folder.remove_expired)
            self._finished.clear()
        batches = await asyncio.to_thread(self._batches)
        busy = {owner.path for owner, batch in batches if (owner.path, batch.id) in self._running}
        for owner, batch in sorted(batches, key=lambda found: found[1].created_at):
            is_cancelling = batch.status is BatchStatus.CANCELLING
            key = owner.path, batch.id
            task = self._running.get(key)
            if task is not None and task.done():
                del self._running[key]
            elif task is not None or batch.status.is_final or time.monotonic() < self._paused.get(key, 0.0):
                if task is not None and is_cancelling and not task.cancelling():
                    task.cancel("by the client")
            elif is_cancelling or owner.path not in busy:
                busy.add(owner.path)
                self._running[key] = asyncio.create_task(self._run_batch(owner, batch))

    def _batches(self) -> list[tuple[OwnerFolder, BatchRecord]]:
        """Read the batches that are not finished."""
        found = []
        for owner in self._folder.owners():
            for batch_id in owner.batches.ids():
                key = owner.path, batch_id
                batch = None if key in self._finished else owner.find_batch(batch_id)
                if batch is not None and batch.status.is_final and key not in self._running:
                    self._finished.add(key)
                elif batch is not None:
                    found.append((owner, batch))
        return found

    async def _run_batch(self, owner: OwnerFolder, batch: BatchRecord) -> None:
        """Run a batch to its end. If it cannot be written, it continues later."""
        try:
            if await self._answer_all(owner, batch):
                finishing = asyncio.create_task(asyncio.to_thread(_finish, owner, batch))
                while not finishing.done():
                    with suppress(asyncio.CancelledError):  # a second run would write the same files at the same time
                        await asyncio.wait([finishing])
                finishing.result()
        except Exception as error:
            if is_full(error):
                log.error("batch %s waits, because the disk is full", batch.id)
            else:
                log.exception("batch %s cannot be written", batch.id)
            self._paused[owner.path, batch.id] = time.monotonic() + PAUSE_SECONDS

    async def _answer_all(self, owner: OwnerFolder, batch: BatchRecord) -> bool:
        """Answer the lines of a batch; return whether its responses are to be made files of."""
        try:
            if batch.status is not BatchStatus.CANCELLING:
                await self._answer(owner, batch)
        except asyncio.CancelledError as error:
            if error.args != ("by the client",):
                raise  # the server stops
            batch.enter(BatchStatus.CANCELLING, batch.cancelling_at or time.time())
        except Exception as error:
            if is_full(error):
                raise
            if not isinstance(error, ChairliftError):
                log.exception("batch %s stopped", batch.id)
                await self._fail(owner, batch, "the server could not run this batch")
                return False
            names = {owner.files.content(batch.input_file_id): "the input file", owner.results(batch.id): "the output"}
            problem = str(error)
            for path, name in names.items():
                problem = problem.replace(repr(str(path)), name)
            await self._fail(owner, batch, problem)
            return False
        return True

    @staticmethod
    async def _fail(owner: OwnerFolder, batch: BatchRecord, problem: str) -> None:
        batch.problem = problem
        batch.enter(BatchStatus.FAILED, time.time())
        await asyncio.to_thread(owner.batches.save, batch.id, batch)

    async def _answer(self, owner: OwnerFolder, batch: BatchRecord) -> None:
        """Answer all lines that have no response yet, until the batch expires."""
        source, target = owner.files.content(batch.input_file_id), owner.results(batch.id)
        if not source.exists():
            raise ChairliftError("the input file was deleted")
        if shutil.disk_usage(source.parent).free < MIN_FREE_BYTES:
            raise StorageFull("no responses can be written")  # This is noticed before any are computed.
        if owner.files.used() > owner.quota:  # output may exceed it, but then no further batch begins
            raise ChairliftError(f"all files exceed the limit of {owner.quota} bytes; delete some")
        most = await self._most_lines()
        options: dict[str, Any] = {"concurrency": most, "paths": (batch.endpoint,), "max_lines": MAX_LINES}
        run = await asyncio.to_thread(BatchRun, source, target, **options)
        batch.total = run.total
        before = await asyncio.to_thread(_count, target)
        batch.enter(BatchStatus.IN_PROGRESS, batch.in_progress_at or time.time())

        def on_progress(run: BatchRun) -> None:
            counts = run.counts
            batch.completed, batch.failed = before[0] + counts.answered, before[1] + counts.failed

        saving = asyncio.create_task(_keep_saved(owner, batch))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                    await run.run(lambda path, body: self._send(path, body, batch), on_progress)
        finally:
            saving.cancel()
            await asyncio.wait([saving])

    async def _most_lines(self) -> int:
        """Wait for the engine; return how many lines of all batches it may have at once."""
        while self._service.engine.state is not EngineState.READY or self._service.engine.loaded is None:
            await asyncio.sleep(POLL_SECONDS)
        return max(1, int(self._service.engine.loaded.max_batch_requests * (1 - FREE_SHARE)))

    async def _send(self, path: str, body: bytes, batch: BatchRecord) -> BatchResponse:
        most = await self._most_lines()
        # Lines that were just sent are not among the engine's open requests yet.
        while self._service.admission.draining or max(self._num_sent, self._service.engine.num_open) >= most:
            await asyncio.sleep(WAIT_SECONDS)
        key = None if batch.key is None else self._keys.get(batch.key)
        if batch.key is not None and key is None:
            raise ChairliftError("the API key of this batch is no longer valid")
        if key is not None:
            # A batch can wait: its lines have the class that they name, if any, and not that of the key.
            key = dataclasses.replace(key, service_class="")
        given = {"api_key": key, "key": batch.key, "tenant": batch.tenant, "allowance": None}
        self._num_sent += 1
        try:
            return await call(self._app, path, body, {**given, "arrived": time.monotonic(), "timelines": {}})
        finally:
            self._num_sent -= 1


async def _keep_saved(owner: OwnerFolder, batch: BatchRecord) -> None:
    """Save a batch's progress again and again. A save that has begun is finished before a later one begins."""
    while True:
        save = asyncio.create_task(asyncio.to_thread(owner.batches.save, batch.id, copy.copy(batch)))
        try:
            with suppress(OSError):  # such as a full disk; the responses are written elsewhere
                await asyncio.shield(save)
        except asyncio.CancelledError:
            await asyncio.wait([save])
            raise
        await asyncio.sleep(POLL_SECONDS)


def _count(results: Path) -> tuple[int, int]:
    """Count the responses of an earlier run: good ones and others."""
    good = bad = 0
    with results.open("rb") as lines:
        for line in lines:
            good, bad = (good + 1, bad) if is_answered(line) else (good, bad + 1)
    return good, bad


def _finish(owner: OwnerFolder, batch: BatchRecord) -> None:
    """Divide the responses into an output and an error file, and enter the final status.

    Ids of these files derive from the batch's, so that a repetition after a crash replaces them.
    """
    results = owner.results(batch.id)
    now = time.time()
    if results.exists():
        batch.completed, batch.failed = _count(results)
        batch.output_file_id = _save(owner, batch, "output", is_answered)
        batch.error_file_id = _save(owner, batch, "error", lambda line: not is_answered(line))
    if batch.status is BatchStatus.CANCELLING:
        batch.enter(BatchStatus.CANCELLED, now)
    elif batch.completed + batch.failed < batch.total:
        batch.enter(BatchStatus.EXPIRED, now)
    else:
        batch.enter(BatchStatus.FINALIZING, batch.finalizing_at or now)
        batch.enter(BatchStatus.COMPLETED, now)
    owner.batches.save(batch.id, batch)
    results.unlink(missing_ok=True)


def _save(owner: OwnerFolder, batch: BatchRecord, kind: str, chosen: Callable[[bytes], bool]) -> str | None:
    """Save the chosen responses as a file; None if there are none."""
    file_id, name = f"file-{batch.id}-{kind}", f"{batch.id}_{kind}.jsonl"
    with owner.results(batch.id).open("rb") as lines:
        found = filter(chosen, lines)
        if (first := next(found, None)) is None:
            return None
        expires_at = int(time.time()) + batch.output_seconds
        pieces = itertools.chain([first], found)
        return owner.files.add(pieces, name, OUTPUT_PURPOSE, file_id=file_id, expires_at=expires_at).id
