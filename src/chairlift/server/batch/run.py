"""Runs a batch file, or resumes an earlier run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.batch.input import PATHS, BatchLine, read_lines, scan
from chairlift.server.batch.output import BatchOutput

SYNC_SECONDS = 1.0  # a power failure loses at most the responses of this interval
RETRY_SECONDS = 0.5
MAX_ATTEMPTS = 3  # for a request whose engine died, since the request may be the cause


@dataclass(frozen=True, slots=True)
class BatchResponse:
    status: int
    request_id: str
    body: bytes
    may_retry: bool = True  # whether the same request may succeed later


Send = Callable[[str, bytes], Awaitable[BatchResponse]]
"""Posts a body to a path of a server."""
ProgressCallback = Callable[["BatchRun"], None]


class BatchRun:
    """One run over a batch file; lines with a response from an earlier run are skipped."""

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        concurrency: int,
        paths: Sequence[str] = PATHS,
        max_lines: int | None = None,
    ) -> None:
        if target.exists() and source.exists() and target.samefile(source):
            raise InvalidParameter("output", "is the input; give another file")
        self._source = source
        self._concurrency = concurrency
        self._paths = paths
        lines = scan(source, paths, max_lines)
        self.total = len(lines)
        self.output = BatchOutput(target)
        if not self.output.done <= lines:
            self.output.close()
            problem = f"{str(target)!r} has answers to requests that are not in {str(source)!r}; give another file"
            raise InvalidParameter("output", problem)
        self.done_before = len(self.output.done)
        self.answered = self.failed = self.output_tokens = 0
        self._suspects = asyncio.Lock()

    @property
    def is_complete(self) -> bool:
        return self.done_before + self.answered + self.failed == self.total

    async def run(self, send: Send, on_progress: ProgressCallback) -> None:
        """Run all lines without a response, `concurrency` at a time."""
        todo = self._todo()
        syncing = asyncio.create_task(self._keep_synced())
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._concurrency):
                    workers.create_task(self._work(todo, send, on_progress))
        except* ChairliftError as errors:
            raise errors.exceptions[0] from None
        finally:
            syncing.cancel()
            self.output.sync()
            self.output.close()

    def _todo(self) -> Iterator[BatchLine]:
        done = self.output.done
        return (line for line in read_lines(self._source, self._paths) if not done.has(line.custom_id, line.number))

    async def _work(self, todo: Iterator[BatchLine], send: Send, on_progress: ProgressCallback) -> None:
        for line in todo:
            if line.problem:
                self.output.write_problem(line)
                self.failed += 1
            else:
                await self._answer(line, send)
            on_progress(self)
            await asyncio.sleep(0)  # a series of invalid lines must not block the event loop

    async def _answer(self, line: BatchLine, send: Send) -> None:
        response = await self._send_until_accepted(line, send)
        for _ in range(MAX_ATTEMPTS - 1):
            if response.status != 503:
                break
            # The engine died, perhaps because of this request. Such requests are retried one at a time, so that they
            # do not fail others.
            async with self._suspects:
                response = await self._send_until_accepted(line, send)
        self.output.write_response(line, response.status, response.request_id, response.body)
        if response.status == 200:
            self.answered += 1
            self.output_tokens += _output_tokens(response.body)
        else:
            self.failed += 1

    async def _send_until_accepted(self, line: BatchLine, send: Send) -> BatchResponse:
        while True:
            response = await send(line.path, line.body)
            if response.status != 429 or not response.may_retry:
                return response
            await asyncio.sleep(RETRY_SECONDS)  # the queue is full, or a limit of the API key is reached

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self.output.sync)


def _output_tokens(body: bytes) -> int:
    """Return the output tokens in a response's usage, for the progress display."""
    usage = json.loads(body).get("usage")
    counts = [usage.get("completion_tokens"), usage.get("output_tokens")] if isinstance(usage, dict) else []
    return next((count for count in counts if isinstance(count, int)), 0)
