"""Runs a batch file, or resumes an earlier run, with an application in this process or another server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from chairlift.client.http import BadResponse, HttpClient
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.batch.input import (
    PATHS,
    WHOLE_FILE,
    BatchLine,
    LineRange,
    LineSet,
    read_lines,
    scan,
    shard_files,
    shard_folder,
)
from chairlift.server.batch.output import BatchCounts, BatchOutput, output_tokens

SYNC_SECONDS = 1.0  # a power failure loses at most the responses of this interval
RETRY_SECONDS = 0.5
SHARD_LOCK_SECONDS = 30.0  # Workers of a run that was killed end in this time, too.
MAX_HELD_BYTES = 64 * 2**20  # requests of a run that are in memory; one more line is read beyond it
UNREACHABLE_SECONDS = 60.0  # an unreachable server ends the run after this time
UNREACHABLE_RETRY_SECONDS = 1.0
MAX_ATTEMPTS = 3  # A request whose engine died may be the cause.


@dataclass(frozen=True, slots=True)
class BatchResponse:
    status: int
    request_id: str
    body: bytes
    may_retry: bool = True  # whether the same request may succeed later
    output_tokens: int = 0


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
        ranges: Sequence[LineRange] = WHOLE_FILE,
        lock_timeout: float = 0.0,
    ) -> None:
        """`ranges` are the lines of the input to answer; `lock_timeout` is as in `BatchOutput`."""
        for parameter, verb, path in (("input", "read", source), ("output", "write", target)):
            if path.exists() and not path.is_file():  # a device may never end, and a pipe cannot be read twice
                raise InvalidParameter(parameter, f"cannot {verb} {str(path)!r}: it is not a regular file")
        if target.exists() and source.exists() and target.samefile(source):
            raise InvalidParameter("output", "is the input; give another file")
        self.source = source
        self._concurrency = concurrency
        self._paths = paths
        self._ranges = ranges
        lines = scan(source, paths, max_lines, ranges)
        self.total = len(lines)
        self.output = BatchOutput(target, lock_timeout=lock_timeout)
        try:
            self._require_own(self.output, lines)
            self.collect_shards(lines)
        except BaseException:
            self.output.close()
            raise
        self.done_before = len(self.output.done)
        self.counts = BatchCounts()  # They count this run only.
        self._suspects = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._held_bytes = 0
        self._released = asyncio.Event()  # set when a line's request is no longer needed

    def _require_own(self, output: BatchOutput, lines: LineSet) -> None:
        if not output.done <= lines:
            problem = f"{str(output.path)!r} has answers to requests that are not in {str(self.source)!r}"
            raise InvalidParameter("output", f"{problem}; give another file")

    def collect_shards(self, lines: LineSet | None = None) -> None:
        """Move the responses that an earlier run left in files of shards; they must be among `lines`, if given."""
        for path in shard_files(self.output.path):
            shard = BatchOutput(path, lock_timeout=SHARD_LOCK_SECONDS)
            try:
                if lines is not None:
                    self._require_own(shard, lines)
                self.output.take_over(shard)
            finally:
                shard.close()
        with suppress(OSError):  # it does not exist, or holds files of others
            shard_folder(self.output.path).rmdir()

    @property
    def is_complete(self) -> bool:
        return self.done_before + self.counts.answered + self.counts.failed == self.total

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
        done, lines = self.output.done, read_lines(self.source, self._paths, self._ranges)
        return (line for line in lines if not done.has(line.custom_id, line.number))

    async def _work(self, todo: Iterator[BatchLine], send: Send, on_progress: ProgressCallback) -> None:
        while (line := await self._next(todo)) is not None:
            try:
                if line.problem:
                    await asyncio.to_thread(self.output.write_problem, line)
                    self.counts.add(None, 0)
                else:
                    await self._answer(line, send)
            finally:
                self._held_bytes -= len(line.body)
                self._released.set()
            on_progress(self)

    async def _next(self, todo: Iterator[BatchLine]) -> BatchLine | None:
        """Read the next line in a thread, once there is room for it; None at the end."""
        async with self._reading:
            while self._held_bytes > MAX_HELD_BYTES:
                self._released.clear()
                await self._released.wait()
            line = await asyncio.to_thread(next, todo, None)
            self._held_bytes += 0 if line is None else len(line.body)
            return line

    async def _answer(self, line: BatchLine, send: Send) -> None:
        response = await self._send_until_accepted(line, send)
        for _ in range(MAX_ATTEMPTS - 1):
            if response.status != 503:
                break
            # The engine died, perhaps because of this request. Such requests are retried one at a time, so that they
            # do not fail others.
            async with self._suspects:
                response = await self._send_until_accepted(line, send)
        await asyncio.to_thread(self.output.write_response, line, response.status, response.request_id, response.body)
        self.counts.add(response.status, response.output_tokens)

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


async def call(
    app: ASGIApp,
    path: str,
    body: bytes,
    state: dict[str, Any] | None = None,
    on_piece: Callable[[bytes], None] = lambda piece: None,
) -> BatchResponse:
    """Send a POST request to an ASGI application; the client never disconnects. `state` is what the guards of a server
    would have found out about it. `on_piece` is called with each piece of the body of a response that is no error."""
    state = {} if state is None else state
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "state": state,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    unread, sent = [body], list[Message]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # never completes: there is no disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and sent[0]["status"] == 200:
            on_piece(message.get("body", b""))

    await app(scope, receive, send)
    start, *parts = sent
    headers = {name.lower(): value for name, value in start["headers"]}
    request_id, content = headers.get(b"x-request-id", b"").decode(), b"".join(part.get("body", b"") for part in parts)
    usage = state.get("usage")  # The handler has counted it.
    tokens = 0 if usage is None else usage.completion_tokens
    return BatchResponse(start["status"], request_id, content, b"retry-after" in headers, tokens)


@asynccontextmanager
async def remote_server(http: HttpClient) -> AsyncIterator[Send]:
    """Send to a running server; wait while it is temporarily unreachable."""

    async def send(path: str, body: bytes) -> BatchResponse:
        end = time.monotonic() + UNREACHABLE_SECONDS
        while True:
            parts: list[bytes] = []
            try:
                response = await http.post(path, body, parts.append)
                if response.status != 503:
                    line, tokens = _as_json_line(b"".join(parts))
                    request_id = response.headers.get("x-request-id", "")
                    return BatchResponse(response.status, request_id, line, output_tokens=tokens)
                problem = "it answers with status 503"
            except (OSError, BadResponse) as error:
                problem = str(error)
            if time.monotonic() > end:
                raise ChairliftError(f"the server at {http.address} is not available: {problem}")
            await asyncio.sleep(UNREACHABLE_RETRY_SECONDS)

    try:
        yield send
    finally:
        http.close()


def _as_json_line(body: bytes) -> tuple[bytes, int]:
    """Convert a body to one line of JSON for the output file, and count its output tokens. Other servers may send
    several lines; an HTML page of a proxy becomes an error that quotes it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        fields = {"error": {"message": body[:1000].decode(errors="replace"), "type": "not_json"}}
    elif b"\n" not in body and b"\r" not in body:
        return body, output_tokens(fields)
    return json.dumps(fields).encode(), output_tokens(fields)
