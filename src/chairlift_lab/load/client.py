"""One request of a load: its HTTP body, and the reading of its stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.client.http import Address, BadResponse, HttpClient
from chairlift.client.response import EventLineParser
from chairlift.errors import InvalidParameter
from chairlift_lab.common.workload import BenchRequest
from chairlift_lab.load.run import LoadRecord

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
