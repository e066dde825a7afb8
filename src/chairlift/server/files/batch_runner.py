"""Runs the batches of a folder below interactive traffic, and continues them after a restart.

A line is sent only while at least a quarter of the engine's slots is free, so that interactive requests find room. Of
each owner one batch runs at a time, the oldest first. One process of those that share the folder does this: the
one that has its lock.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from fastapi import FastAPI

from chairlift.errors import ChairliftError
from chairlift.server.access.keys import KeyTable
from chairlift.server.batch.asgi_call import call
from chairlift.server.batch.run import BatchResponse, BatchRun
from chairlift.server.files.batch_record import BatchRecord, BatchStatus
from chairlift.server.files.file_store import OUTPUT_PURPOSE
from chairlift.server.files.folder import FilesFolder, OwnerFolder
from chairlift.server.process.engine_client import EngineState
from chairlift.server.service import Service

log = logging.getLogger("chairlift.server")

POLL_SECONDS = 0.5  # between looks at the folder, which other processes may have changed
WAIT_SECONDS = 0.02  # between looks at the engine while it has no room
FREE_SHARE = 0.25  # of the engine's slots stay free for interactive requests
MAX_LINES = 50_000  # of a batch, as in OpenAI's API; they are in memory


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

    async def run(self) -> None:
        """Run batches until cancelled; what is not finished continues at the next start."""
        try:
            while True:
                try:
                    if self._folder.lock():
                        await self._look()
                except Exception:  # such as no file descriptors, for a while
                    log.exception("the folder of batches cannot be read")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look(self) -> None:
        """Start batches that are new or were interrupted, and cancel those that clients have cancelled."""
        batches = await asyncio.to_thread(self._batches)
        busy = {owner.path for owner, batch in batches if (owner.path, batch.id) in self._running}
        for owner, batch in sorted(batches, key=lambda found: found[1].created_at):
            is_cancelling = batch.status is BatchStatus.CANCELLING
            key = owner.path, batch.id
            task = self._running.get(key)
            if task is not None and task.done():
                del self._running[key]
            elif task is None and not batch.status.is_final and (is_cancelling or owner.path not in busy):
                busy.add(owner.path)
                self._running[key] = asyncio.create_task(self._run_batch(owner, batch))
            elif task is not None and is_cancelling and not task.cancelling():
                task.cancel("by the client")

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
        try:
            if batch.status is not BatchStatus.CANCELLING:
                await self._answer(owner, batch)
        except asyncio.CancelledError as error:
            if error.args != ("by the client",):
                raise  # the server stops
            batch.enter(BatchStatus.CANCELLING, batch.cancelling_at or time.time())
        except ChairliftError as error:
            source = str(owner.files.content(batch.input_file_id))
            await self._fail(owner, batch, str(error).replace(repr(source), "the input file"))
            return
        except Exception:
            log.exception("batch %s stopped", batch.id)
            await self._fail(owner, batch, "the server could not run this batch")
            return
        finishing = asyncio.create_task(asyncio.to_thread(_finish, owner, batch))
        while not finishing.done():
            with suppress(asyncio.CancelledError):  # a second run would write the same files at the same time
                await asyncio.wait([finishing])
        finishing.result()

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
        run = await asyncio.to_thread(self._open, source, target, await self._most_lines(), batch.endpoint)
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

    @staticmethod
    def _open(source: Path, target: Path, concurrency: int, endpoint: str) -> BatchRun:
        return BatchRun(source, target, concurrency=concurrency, paths=(endpoint,), max_lines=MAX_LINES)

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
            good, bad = (good + 1, bad) if _is_good(line) else (good, bad + 1)
    return good, bad


def _is_good(line: bytes) -> bool:
    response = json.loads(line)["response"]
    return response is not None and response["status_code"] == 200


def _finish(owner: OwnerFolder, batch: BatchRecord) -> None:
    """Divide the responses into an output and an error file, and enter the final status.

    Ids of these files derive from the batch's, so that a repetition after a crash replaces them.
    """
    results = owner.results(batch.id)
    now = time.time()
    if results.exists():
        batch.completed, batch.failed = _count(results)
        batch.output_file_id = _save(owner, batch.id, "output", results, _is_good)
        batch.error_file_id = _save(owner, batch.id, "error", results, lambda line: not _is_good(line))
    if batch.status is BatchStatus.CANCELLING:
        batch.enter(BatchStatus.CANCELLED, now)
    elif batch.completed + batch.failed < batch.total:
        batch.enter(BatchStatus.EXPIRED, now)
    else:
        batch.enter(BatchStatus.FINALIZING, batch.finalizing_at or now)
        batch.enter(BatchStatus.COMPLETED, now)
    owner.batches.save(batch.id, batch)
    results.unlink(missing_ok=True)


def _save(owner: OwnerFolder, batch_id: str, kind: str, results: Path, chosen: Callable[[bytes], bool]) -> str | None:
    """Save the chosen lines as a file; None if there are none."""
    file_id, name = f"file-{batch_id}-{kind}", f"{batch_id}_{kind}.jsonl"
    temporary: IO[bytes]
    with TemporaryFile() as temporary, results.open("rb") as lines:
        for line in lines:
            if chosen(line):
                temporary.write(line)
        if not temporary.tell():
            return None
        temporary.seek(0)
        return owner.files.add(temporary, name, OUTPUT_PURPOSE, file_id=file_id).id
