"""Sends requests to a server in a closed or an open loop, and records what happened to each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.client.http import Address, BadResponse, EventLineParser, HttpClient
from chairlift.errors import InvalidParameter
from chairlift_lab.common.workload import BenchRequest


@dataclass(slots=True)
class LoadRecord:
    """The times and token counts of one request; times are seconds since the run began."""

    due: float  # the planned time
    sent: float
    times: list[float] = field(default_factory=list)  # arrival of each piece with tokens
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None  # the kind of failure
    retry_after: float | None = None  # seconds that the server asks to wait before the next attempt


@dataclass(slots=True)
class LoadRun:
    """One run of a workload."""

    seconds: float  # the time from the first request to the end of the last
    records: list[LoadRecord]
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # seconds by role of the process


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of requests in flight: the next is sent when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent at given times, independent of those before them."""

    times: Callable[[], Iterator[float]]  # seconds from the start, rising; one for each request, or endless


LoadLoop = ClosedLoop | OpenLoop
SendRequest = Callable[[BenchRequest, LoadRecord, Callable[[], float]], Awaitable[None]]
"""Sends a request and fills in its record; the last argument is the run's clock. Never raises."""
LoadProgress = Callable[[int, int, int], None]
"""Called with the numbers of finished requests, of open requests, and of pieces of answers received."""


class LoadGenerator:
    """Sends the requests of one run."""

    def __init__(self, send: SendRequest, *, duration: float | None = None) -> None:
        self.records: list[LoadRecord] = []
        self.num_open = 0
        self._send = send
        self._duration = float("inf") if duration is None else duration
        self._start_time = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start_time

    async def run(self, requests: Iterable[BenchRequest], loop: LoadLoop) -> LoadRun:
        """Send all requests, or those due within the duration, and wait for all of them."""
        cpu, self._start_time = time.process_time(), time.perf_counter()
        if isinstance(loop, ClosedLoop):
            await self._run_closed(iter(requests), loop.concurrency)
        else:
            await self._run_open(iter(requests), loop.times())
        seconds = max((record.end for record in self.records), default=0.0)
        return LoadRun(seconds, self.records, {"client": time.process_time() - cpu})

    async def _run_closed(self, requests: Iterator[BenchRequest], concurrency: int) -> None:
        async def send_in_turn() -> None:
            while self.now() < self._duration:
                request = next(requests, None)
                if request is None:
                    return
                await self._send_one(request, due=self.now())

        async with asyncio.TaskGroup() as senders:
            for _ in range(concurrency):
                senders.create_task(send_in_turn())

    async def _run_open(self, requests: Iterator[BenchRequest], times: Iterator[float]) -> None:
        async with asyncio.TaskGroup() as in_flight:
            for due, request in zip(times, requests, strict=False):  # either may be endless
                if due >= self._duration:
                    return
                await asyncio.sleep(max(0.0, due - self.now()))
                in_flight.create_task(self._send_one(request, due))

    async def _send_one(self, request: BenchRequest, due: float) -> None:
        record = LoadRecord(due, self.now())
        self.records.append(record)
        self.num_open += 1
        try:
            await self._send(request, record, self.now)
        finally:
            self.num_open -= 1


APIS = ("completions", "chat")

# Words of chat prompts: for most tokenizers, each with the space before it is one token.
# fmt: off
WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "with", "as", "be", "this", "by",
    "have", "from", "or", "one", "had", "not", "but", "what", "all", "were", "when", "we", "can", "an", "your",
    "which", "their", "if", "do", "will", "each", "about", "how", "up", "out", "them", "then", "many", "some", "so",
    "these", "would", "other", "into", "has", "more", "two", "like", "see", "time", "could", "no", "make", "than",
    "first", "been", "its", "who", "now", "people", "my", "made", "over", "did", "down", "only", "way",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """The API and parameters of all requests; `extra` is added to every body and overrides other fields."""

    model: str
    api: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise InvalidParameter("api", f"there is no {self.api!r}; choose from {', '.join(APIS)}")

    @property
    def path(self) -> str:
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def body(self, request: BenchRequest) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.n_out,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:  # most engines accept it; OpenAI itself refuses it
            fields["ignore_eos"] = True
        if self.api == "completions":
            fields["prompt"] = request.prompt_ids
        else:
            text = " ".join(WORDS[token % len(WORDS)] for token in request.prompt_ids)
            fields["messages"] = [{"role": "user", "content": text}]
        return json.dumps(fields | dict(self.extra), separators=(",", ":")).encode()


class LoadClient:
    """Sends requests and reads their streams; errors go to the record and are never raised."""

    def __init__(self, http: HttpClient, request_format: RequestFormat, *, timeout: float) -> None:
        self.num_pieces = 0  # stream events with tokens, of all requests so far
        self._http = http
        self._wording = request_format
        self._timeout = timeout

    @property
    def address(self) -> Address:
        return self._http.address

    async def send(self, request: BenchRequest, record: LoadRecord, now: Callable[[], float]) -> None:
        answer = _StreamReader(self, record, now)
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._http.post(self._wording.path, self._wording.body(request), answer.feed)
            record.error = answer.problem(response.status)
            if (pause := response.headers.get("retry-after", "")).isdigit():
                record.retry_after = float(pause)
        except TimeoutError:
            record.error = "timeout"
        except BadResponse as error:
            record.error = f"bad response: {error}"
        except OSError as error:
            record.error = f"connection: {error.strerror or error}"
        record.end = now()
        record.input_tokens = record.input_tokens or len(request.prompt_ids)
        record.output_tokens = record.output_tokens or len(record.times)


class _StreamReader:
    """Reads the stream of one answer and records when its pieces arrived."""

    def __init__(self, client: LoadClient, record: LoadRecord, now: Callable[[], float]) -> None:
        self._client = client
        self._record = record
        self._now = now
        self._lines = EventLineParser()
        self._start = b""  # the start of the body, which holds the error if there is no stream
        self._finished = False
        self._problem: str | None = None

    def feed(self, data: bytes) -> None:
        now = self._now()
        if len(self._start) < 2000:
            self._start += data[:2000]
        for event in self._lines.feed(data):
            if event == b"[DONE]":
                continue
            try:
                self._read(json.loads(event), now)
            except (ValueError, TypeError, KeyError, AttributeError):
                self._problem = "bad stream: an event that is not in OpenAI's format"

    def _read(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            self._problem = f"stream: {_error_name(chunk)}"
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason") is not None:
                self._finished = True
            if _has_tokens(choice):
                self._record.times.append(now)
                self._client.num_pieces += 1
        usage = chunk.get("usage")
        if usage:
            self._record.input_tokens = usage["prompt_tokens"]
            self._record.output_tokens = usage["completion_tokens"]
            self._record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def problem(self, status: int) -> str | None:
        """The error of the complete answer, if any."""
        if status != 200:
            return f"HTTP {status} {self._refusal()}".strip()
        if self._problem is None and not self._finished:
            return "stream: ended too early"
        return self._problem

    def _refusal(self) -> str:
        try:
            return _error_name(json.loads(self._start))
        except (ValueError, TypeError, KeyError, AttributeError):
            return ""


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether an event has tokens; the first and last of some servers hold only the role or the finish reason."""
    delta = choice.get("delta")
    if delta is None:
        # A token may have no text yet: half a character.
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return any(delta.get(part) for part in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _error_name(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error if isinstance(error, str) else error.get("code") or error.get("type") or "error")[:60]
