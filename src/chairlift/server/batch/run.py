"""Answering a batch file, and taking up where an earlier run was ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.batch.input import BatchLine, read_lines, scan
from chairlift.server.batch.output import BatchOutput

SYNC_SECONDS = 1.0  # a power failure costs at most what was answered within this time
RETRY_SECONDS = 0.5
MAX_TRIES = 3  # of a request whose engine died; one that kills engines must not do it for ever


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    request_id: str
    body: bytes


Send = Callable[[str, bytes], Awaitable[Answer]]
"""Posts a body to a path of a server, whatever that is."""
Watch = Callable[["BatchRun"], None]


class BatchRun:
    """One run over a batch file; what an earlier run has answered is not done again."""

    def __init__(self, source: Path, target: Path, *, concurrency: int) -> None:
        if target.exists() and source.exists() and target.samefile(source):
            raise InvalidParameter("output", "is the input; give another file")
        self._source = source
        self._concurrency = concurrency
        lines = scan(source)
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

    async def run(self, send: Send, watch: Watch) -> None:
        """Answer every line that has no answer yet, so many at a time."""
        todo = self._todo()
        syncing = asyncio.create_task(self._keep_synced())
        try:
            async with asyncio.TaskGroup() as seats:
                for _ in range(self._concurrency):
                    seats.create_task(self._work(todo, send, watch))
        except* ChairliftError as errors:
            raise errors.exceptions[0] from None
        finally:
            syncing.cancel()
            self.output.sync()
            self.output.close()

    def _todo(self) -> Iterator[BatchLine]:
        done = self.output.done
        return (line for line in read_lines(self._source) if not done.has(line.custom_id, line.number))

    async def _work(self, todo: Iterator[BatchLine], send: Send, watch: Watch) -> None:
        for line in todo:
            if line.problem:
                self.output.write_problem(line)
                self.failed += 1
            else:
                await self._answer(line, send)
            watch(self)
            await asyncio.sleep(0)  # bad lines must not keep the others from being heard

    async def _answer(self, line: BatchLine, send: Send) -> None:
        answer = await self._patiently(line, send)
        for _ in range(MAX_TRIES - 1):
            if answer.status != 503:
                break
            # The engine died, perhaps of this request. Those that may have done it are tried one by one, so that
            # the others get their answers.
            async with self._suspects:
                answer = await self._patiently(line, send)
        self.output.write_answer(line, answer.status, answer.request_id, answer.body)
        if answer.status == 200:
            self.answered += 1
            self.output_tokens += _output_tokens(answer.body)
        else:
            self.failed += 1

    async def _patiently(self, line: BatchLine, send: Send) -> Answer:
        while (answer := await send(line.path, line.body)).status == 429:  # too busy: its turn will come
            await asyncio.sleep(RETRY_SECONDS)
        return answer

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self.output.sync)


def _output_tokens(body: bytes) -> int:
    """As the server counted them; nothing depends on it but what the progress shows."""
    usage = json.loads(body).get("usage")
    counts = [usage.get("completion_tokens"), usage.get("output_tokens")] if isinstance(usage, dict) else []
    return next((count for count in counts if isinstance(count, int)), 0)
