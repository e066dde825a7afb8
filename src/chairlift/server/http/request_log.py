"""The lines about requests that a person reads: one for each on standard error, and a summary where there are many.

They have neither prompts nor outputs. Only the beginning of an error's message is shown. A thread writes them, because
a terminal that is paused accepts nothing, and the server goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from starlette.types import Scope

from chairlift.server.generation.usage import Timeline
from chairlift.server.http.boundary import SentResponse

LINES_PER_SECOND = 20  # Beyond these, the requests of a second are summed up in one line.
MAX_TEXT = 100  # characters of a path or of an error's message
MAX_UNWRITTEN = 1000  # lines; more are dropped while the terminal is paused
STARTING = 503  # the answer of health checks while the engine starts
# Their successes say nothing new, and monitoring asks for them again and again, also during the start.
_POLLED = ("/health", "/ready", "/ping", "/metrics", "/version", "/dashboard", "/favicon.ico", "/usage-reports")
_COLOURS = {4: 33, 5: 31}  # Yellow and red, by the first digit of the status.


# A value that was shortened has no quote at its end. An apostrophe begins none. The names of models are kept.
_QUOTE = re.compile(r"""(the model )?(?<!\w)(['"])((?:\\.|(?!\2).)*)(?:\2|\Z)""", re.DOTALL)
LONGEST_QUOTE = 24  # characters; more may be a prompt


@dataclass(slots=True)
class _Second:
    """The requests that ended within one second."""

    began: float = float("-inf")
    shown: int = 0
    statuses: Counter[str] = field(default_factory=Counter)  # Those of requests that were not shown.
    tokens_in: int = 0
    tokens_out: int = 0


class RequestLog:
    """Writes a line when a response has ended. `lines` are the most in a second."""

    def __init__(self, lines: int = LINES_PER_SECOND, write: Callable[[str, int], None] | None = None) -> None:
        self._lines = lines
        self._write = write or _Writer().put
        self._second = _Second()

    def begin(self, scope: Scope) -> Callable[[SentResponse], None]:
        began = time.monotonic()

        def end(sent: SentResponse) -> None:
            expected = sent.status is not None and (sent.status < 400 or sent.status == STARTING)
            if not (expected and scope["path"].startswith(_POLLED)):
                self._count(_Ended(scope, sent, began))

        return end

    def _count(self, ended: _Ended) -> None:
        now = time.monotonic()
        if now - self._second.began >= 1.0:
            self._sum_up()
            self._second = _Second(now)
        second = self._second
        if second.shown < self._lines:
            second.shown += 1
            self._write(ended.line(), ended.sent.status or 0)
            return
        if not second.statuses:
            with suppress(RuntimeError):  # no loop runs in some tests
                asyncio.get_running_loop().call_later(max(0.0, second.began + 1.0 - now), self._sum_up)
        second.statuses[ended.status] += 1
        second.tokens_in += ended.tokens.get("prompt_tokens", 0)
        second.tokens_out += ended.tokens.get("completion_tokens", 0)

    def _sum_up(self) -> None:
        """Write the line about the requests of a second that had none of their own."""
        second = self._second
        if second.statuses:
            counts = ", ".join(f"{count} × {status}" for status, count in sorted(second.statuses.items()))
            self._write(
                f"{_clock()}  … and {second.statuses.total():,} more: {counts}; "
                f"in {second.tokens_in:,}, out {second.tokens_out:,} tokens",
                200,
            )
        second.statuses, second.tokens_in, second.tokens_out = Counter(), 0, 0


@dataclass(slots=True)
class _Ended:
    """A request whose response has ended."""

    scope: Scope
    sent: SentResponse
    began: float

    @property
    def status(self) -> str:
        return "no answer" if self.sent.status is None else str(self.sent.status)

    @property
    def tokens(self) -> Mapping[str, int]:
        usage = self.scope["state"].get("usage")
        return {} if usage is None else usage.counts()

    def line(self) -> str:
        method, path = _short(self.scope["method"]), _short(self.scope["path"])
        parts = [_clock(), f"{method} {path}", self.status, *self._figures(), _seconds(time.monotonic() - self.began)]
        if self.sent.error:
            parts.append(_short(_message_of(self.sent.error)))
        elif not self.sent.is_complete:
            parts.append("the client left before the end")
        return "  ".join(parts)

    def _figures(self) -> list[str]:
        """The tokens, the time to the first one, and the tokens per second after it."""
        counts = self.tokens
        if not counts:
            return []
        cached, out = counts.get("cached_tokens", 0), counts["completion_tokens"]
        found = [f"in {counts['prompt_tokens']:,}{f' ({cached:,} cached)' if cached else ''}"]
        if out == 0:
            return found
        found.append(f"out {out:,}")
        first, last = self._token_times()
        if first is not None:
            found.append(f"TTFT {_seconds(first - self.began)}")
            if out > 1 and last > first:
                found.append(f"{(out - 1) / (last - first):,.0f} tokens/s")
        return found

    def _token_times(self) -> tuple[float | None, float]:
        """When the first and the last token came; in a relay, when the response's body began and ended."""
        lines: Mapping[str, Timeline] = self.scope["state"].get("timelines") or {}
        firsts = [line.first_token for line in lines.values() if line.first_token is not None]
        if firsts:
            return min(firsts), max(line.last_token for line in lines.values())
        headers = dict(self.sent.head.get("headers", ()))
        is_stream = headers.get(b"content-type", b"").startswith((b"text/event-stream", b"application/x-ndjson"))
        return (self.sent.first_body if is_stream else None), time.monotonic()


def _message_of(body: bytes) -> str:
    """The message in the body of an error, without long values that it quotes: they may be prompts."""
    try:
        error = json.loads(body)["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace")
    return _QUOTE.sub(_shorten_quote, message)


def _shorten_quote(quote: re.Match[str]) -> str:
    before, mark, value = quote.groups()
    return quote[0] if before or len(value) < LONGEST_QUOTE else f"{mark}…{mark}"


def _short(text: str) -> str:
    """The beginning of a text from outside, with control characters escaped."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[: MAX_TEXT + 1])
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"


def _seconds(time: float) -> str:
    return f"{1000 * time:.0f} ms" if time < 1 else f"{time:.2f} s"


def _clock() -> str:
    return datetime.now().strftime("%H:%M:%S")


class _Writer:
    """Writes lines in a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue(MAX_UNWRITTEN)
        threading.Thread(target=self._run, name="request log", daemon=True).start()

    def put(self, line: str, status: int) -> None:
        colour = _COLOURS.get(status // 100) if sys.stderr.isatty() and "NO_COLOR" not in os.environ else None
        with suppress(queue.Full):
            self._lines.put_nowait(line if colour is None else f"\x1b[{colour}m{line}\x1b[0m")

    def _run(self) -> None:
        while True:
            with suppress(OSError, ValueError):  # standard error is closed or full
                print(self._lines.get(), file=sys.stderr, flush=True)
