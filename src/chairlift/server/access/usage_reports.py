"""What a server tells a proxy with a key of its own, such as the ingress of a fleet, about the tokens of each request.

The proxy sends an id of the request in `REPORT_HEADER`. A whole response has the report in the header `USAGE_HEADER`;
in a stream, a comment in front of each piece has the tokens so far. After a response was cut short, the report is at
`REPORTS_PATH` + id for a while. Proxies remove the reports from what clients receive.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import JSONResponse
from starlette.types import Message, Send

from chairlift.server.generation.usage import Usage
from chairlift.server.http.errors import APIError

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
        self._usages: OrderedDict[str, Callable[[], Usage | None]] = OrderedDict()  # by id

    def begin(self, report_id: str, state: Mapping[str, Any]) -> None:
        self._usages[report_id] = partial(state.get, "usage")
        while len(self._usages) > MAX_KEPT:
            self._usages.popitem(last=False)

    def end(self, report_id: str, usage: Usage | None) -> None:
        if report_id in self._usages:
            self._usages[report_id] = lambda: usage  # without the rest of the request

    def answer(self, report_id: str) -> JSONResponse:
        """The report of a request; if its client has just left, a few tokens may be missing."""
        if report_id not in self._usages:
            return APIError(404, "there is no report with this id", code="not_found").response()
        usage = self._usages[report_id]()  # None: nothing was submitted to the engine
        return JSONResponse((UsageReport(0, 0) if usage is None else UsageReport.of(usage))._asdict())


def send_with_reports(send: Send, state: Mapping[str, Any]) -> Send:
    """Return a `send` that adds the report to a whole response, or one to each piece of a stream."""
    is_stream = False

    async def send_with_report(message: Message) -> None:
        nonlocal is_stream
        usage: Usage | None = state.get("usage")
        if message["type"] == "http.response.start":
            is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            if usage is not None and not is_stream:
                message["headers"] = [*message["headers"], (USAGE_HEADER, UsageReport.of(usage).header())]
        elif is_stream and usage is not None and message.get("body"):
            message["body"] = UsageReport.of(usage).comment() + message["body"]
        await send(message)

    return send_with_report
