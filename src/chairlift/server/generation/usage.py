"""What one request uses: its tokens, the times of its phases, the reports of both, and its texts for the dashboard.

A server tells a proxy with a key of its own, such as the ingress of a fleet, about the tokens of each request. The
proxy sends an id of the request in `REPORT_HEADER`. A whole response has the report in the header `USAGE_HEADER`; in a
stream, a comment in front of each piece has the tokens so far. After a response was cut short, the report is at
`REPORTS_PATH` + id for a while. Proxies remove the reports from what clients receive.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import JSONResponse
from starlette.types import Message, Send

from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.reasoning import ReasoningTracker
from chairlift.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    engine_died: bool = False  # while it worked on the request
    # Creates the tracker of a completion's reasoning; None for endpoints and models without reasoning.
    new_tracker: Callable[[], ReasoningTracker | None] | None = None
    _trackers: dict[str, ReasoningTracker | None] = field(default_factory=dict)  # The key is the completion.
    _admitted: set[str] = field(default_factory=set)  # completions whose cached tokens are counted

    def add(self, update: Update) -> None:
        self.completion_tokens += len(update.tokens)
        if self.new_tracker is not None:
            self._count_reasoning(update)
        # A preempted completion is admitted again, and completions of one prompt share its cached tokens: count only
        # the first admission of the first completion.
        if update.cached_tokens is not None and update.request_id not in self._admitted:
            self._admitted.add(update.request_id)
            if "#" not in update.request_id:
                self.cached_tokens += update.cached_tokens

    def counts(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def _count_reasoning(self, update: Update) -> None:
        assert self.new_tracker is not None
        if update.request_id not in self._trackers:
            self._trackers[update.request_id] = self.new_tracker()
        tracker = self._trackers[update.request_id]
        if tracker is None or tracker.over:
            return
        before = tracker.count
        for token in update.tokens:
            tracker.push(token)
        self.reasoning_tokens += tracker.count - before

    def body(self, *, without: int = 0) -> dict[str, Any]:
        """Return OpenAI's object; `without` completion tokens are left out."""
        completion_tokens = self.completion_tokens - without
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Latencies(NamedTuple):
    """The times of a completion that targets are about, in seconds."""

    ttft: float
    tpot: float | None
    e2e: float


@dataclass(slots=True)
class Timeline:
    """When one completion passed its phases, on the monotonic clock. The first admission counts."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None

    def seconds(self, phase: str) -> float:
        """Return how long a phase took; 0 if it has not ended."""
        start, end = self.phases().get(phase, (0.0, 0.0))
        return end - start

    def latencies(self, now: float) -> Latencies:
        """Return its times once it has ended; those of what it did not come to are infinite."""
        complete = self.finish_reason in ("stop", "length")
        first = self.first_token
        if first is None:  # A request about its prompt alone has its answer at its end.
            first = now if complete else math.inf
        later = self.num_tokens - 1
        tpot = (self.last_token - first) / later if later > 0 else None
        return Latencies(first - self.arrived, tpot, now - self.arrived if complete else math.inf)

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return the start and the end of each phase that has ended."""
        found = {}
        if self.admitted is not None:
            found["queue"] = (self.arrived, max(self.arrived, self.admitted))
            if self.first_token is not None:
                found["prefill"] = (found["queue"][1], self.first_token)
                found["decode"] = (self.first_token, self.last_token)
        return found


@dataclass(frozen=True, slots=True)
class StreamMetrics:
    """Records metrics when updates arrive at the front end, so that slow clients do not affect them. Times count from
    the request's arrival."""

    _metrics: Metrics
    _arrived: float
    _timelines: dict[str, Timeline]  # The key is the completion.
    _texts: RequestTexts | None  # None while no dashboard page is open
    _targets: Targets = NO_TARGETS
    _class: str = ""  # The name under which it counts whether the targets were met.

    def on_update(self, update: Update) -> None:
        now = time.monotonic()
        line = self._timelines.get(update.request_id)
        if line is None:
            line = self._timelines[update.request_id] = Timeline(self._arrived)
        if update.text and self._texts is not None:
            self._texts.add(update)
        if update.cached_tokens is not None and line.admitted is None:  # again after a preemption
            line.admitted = now if update.admitted is None else update.admitted
            line.cached_tokens = update.cached_tokens
            if "#" not in update.request_id:  # completions of one prompt share it, so count only the first
                self._metrics.cached_tokens.inc(update.cached_tokens)
        if update.tokens:
            self._count_tokens(line, len(update.tokens), now)
        if update.finish_reason is not None:
            line.finish_reason = update.finish_reason
            self._metrics.end_to_end.observe(now - self._arrived)
            self._metrics.requests.labels(line.finish_reason).inc()
            self._metrics.request_output_tokens.observe(line.num_tokens)
            for phase, (start, end) in line.phases().items():
                self._metrics.phases[phase].observe(end - start)
            if self._targets.given and line.finish_reason != "cancelled":
                self._metrics.record_targets(self._class, self._targets.judge(line.latencies(now)))

    def _count_tokens(self, line: Timeline, count: int, now: float) -> None:
        if line.first_token is None:
            line.first_token = now
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token.observe((now - line.last_token) / count)
        line.last_token = now
        line.num_tokens += count
        self._metrics.output_tokens.inc(count)

    def on_cut_short(self, reason: str, count: int) -> None:
        self._metrics.requests.labels(reason).inc(count)


# The end of an event by the type of a stream. Neither kind of event contains a line that looks like a report.
STREAM_ENDS = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}
REPORT_HEADER, USAGE_HEADER = b"x-chairlift-report", b"x-chairlift-usage"
REPORTS_PATH = "/usage-reports/"
MAX_KEPT = 2000  # requests whose usage can be asked for

_COMMENT = re.compile(rb"(?<![^\n]): usage (\d+) (\d+) (ok|died)\n")
_HEADER = re.compile(rb"(\d+) (\d+) (ok|died)")


class UsageReport(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    engine_died: bool = False  # while it worked on the request

    @classmethod
    def of(cls, usage: Usage) -> UsageReport:
        return cls(usage.prompt_tokens, usage.completion_tokens, usage.engine_died)

    @classmethod
    def of_request(cls, state: Mapping[str, Any]) -> UsageReport | None:
        """What a request has used by now, with the tokens that its client has not read; None if it used nothing."""
        usage: Usage | UsageReport | None = state.get("usage")
        if usage is None:
            return None
        generated = sum(line.num_tokens for line in state["timelines"].values())
        return cls(usage.prompt_tokens, max(usage.completion_tokens, generated), usage.engine_died)

    def header(self) -> bytes:
        return b"%d %d %b" % (self.prompt_tokens, self.completion_tokens, b"died" if self.engine_died else b"ok")

    def comment(self) -> bytes:
        return b": usage " + self.header() + b"\n"

    def counts(self) -> dict[str, int]:
        """What the access log shows."""
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}


def read_header(value: bytes) -> UsageReport | None:
    found = _HEADER.fullmatch(value)
    return None if found is None else _report(found)


def take_comments(events: bytes) -> tuple[bytes, UsageReport | None]:
    """Return whole events without the reports among them, and the last report. No event can contain one: the data of an
    event is JSON, in which line ends are escaped."""
    reports = list(_COMMENT.finditer(events))
    return (_COMMENT.sub(b"", events), _report(reports[-1])) if reports else (events, None)


def _report(found: re.Match[bytes]) -> UsageReport:
    return UsageReport(int(found[1]), int(found[2]), found[3] == b"died")


class UsageReports:
    """The usage of the last requests that a proxy has given an id."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, Callable[[], UsageReport | None]] = OrderedDict()  # The key is the id.

    def begin(self, report_id: str, state: Mapping[str, Any]) -> None:
        self._reports[report_id] = partial(UsageReport.of_request, state)
        while len(self._reports) > MAX_KEPT:
            self._reports.popitem(last=False)

    def end(self, report_id: str, state: Mapping[str, Any]) -> None:
        if report_id in self._reports:
            report = UsageReport.of_request(state)
            self._reports[report_id] = lambda: report  # without the rest of the request

    def answer(self, report_id: str) -> JSONResponse:
        """The report of a request; if its client has just left, a few tokens may be missing."""
        if report_id not in self._reports:
            return APIError(404, "there is no report with this id", code="not_found").response()
        report = self._reports[report_id]()  # None: nothing was submitted to the engine
        return JSONResponse((report or UsageReport(0, 0))._asdict())


def send_with_reports(send: Send, state: Mapping[str, Any]) -> Send:
    """Return a `send` that adds the report to a whole response, or one to each piece of a stream."""
    is_stream = False

    async def send_with_report(message: Message) -> None:
        nonlocal is_stream
        usage: Usage | None = state.get("usage")
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"").partition(b";")[0]
            is_stream = kind.decode("latin-1") in STREAM_ENDS
            if usage is not None and not is_stream:
                message["headers"] = [*message["headers"], (USAGE_HEADER, UsageReport.of(usage).header())]
        elif is_stream and usage is not None and message.get("body"):
            message["body"] = UsageReport.of(usage).comment() + message["body"]
        await send(message)

    return send_with_report


MAX_REQUESTS = 512
MAX_PROMPT_TOKENS = 400
MAX_CHARACTERS = 4000


@dataclass(slots=True)
class _Text:
    key: bytes | None  # API key of the request
    prompt: Sequence[int]  # the last tokens: many prompts share the first ones
    prompt_is_whole: bool
    pieces: list[str] = field(default_factory=list)
    size: int = 0


class RequestTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_watched = False  # whether any page is open, and texts are to be added
        self._tokenizer = tokenizer
        self._texts: OrderedDict[str, _Text] = OrderedDict()

    def open(self, ids: Sequence[str], prompt: Sequence[int], key: bytes | None) -> None:
        """Start the texts of all completions of one prompt."""
        for request_id in ids:
            self._texts[request_id] = _Text(key, prompt[-MAX_PROMPT_TOKENS:], len(prompt) <= MAX_PROMPT_TOKENS)
        while len(self._texts) > MAX_REQUESTS:
            self._texts.popitem(last=False)

    def add(self, update: Update) -> None:
        text = self._texts.get(update.request_id)
        if text is not None and text.size <= MAX_CHARACTERS:
            text.pieces.append(update.text)
            text.size += len(update.text)

    def find(self, request_id: str, key: bytes | None) -> dict[str, str | bool] | None:
        """Return the texts of a request; None if they are not kept or belong to another key."""
        text = self._texts.get(request_id)
        if text is None or text.key != key:
            return None
        return {
            "prompt": self._tokenizer.decode(list(text.prompt)),
            "prompt_is_whole": text.prompt_is_whole,
            "output": "".join(text.pieces)[:MAX_CHARACTERS],
            "output_is_whole": text.size <= MAX_CHARACTERS,
        }

    def clear(self) -> None:
        self._texts.clear()
