"""What the commands write, and where: results on standard output, everything about them on standard error."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.text import Text

from chairlift.core.events import Event, RequestBoarded, RequestFinished, RequestQueued, TokenProduced
from chairlift.core.request import Ending, FinishReason
from chairlift.errors import ChairliftError

# Escape sequences in a model's output, or in an error that quotes its files, could reprogram the terminal.
_CONTROL_CODES = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


def write_text(text: str) -> None:
    """A piece of a model's output, at once and as it is."""
    sys.stdout.write(text.translate(_CONTROL_CODES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(message: str, style: str = "dim") -> None:
    """A line about what goes on."""
    # A console of its own each time: tests and callers may have exchanged sys.stderr since the last one.
    Console(stderr=True, soft_wrap=True).print(Text(message.translate(_CONTROL_CODES), style))


def show_error(message: str) -> None:
    shown = Text.assemble(("error: ", "bold red"), (message.translate(_CONTROL_CODES), "red"))
    Console(stderr=True, soft_wrap=True).print(shown)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def show_log(*, quiet: bool) -> None:
    """Let what the engine logs appear as notes; quietly, only warnings."""
    log = logging.getLogger("chairlift")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [_Notes()]


class AnswerMeter:
    """Follows the engine's events for the figures of the latest request, where there is one at a time."""

    def __init__(self) -> None:
        self._arrival = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._token_times: list[float] = []
        self._ending: Ending | None = None

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case RequestQueued():
                    self._arrival, self._prompt_tokens = event.time, event.num_prompt
                    self._cached_tokens, self._token_times, self._ending = 0, [], None
                case RequestBoarded() if not self._token_times:
                    self._cached_tokens = event.cached_tokens
                case TokenProduced():
                    self._token_times.append(event.time)
                case RequestFinished():
                    self._ending = event.ending
                case _:
                    pass

    def check(self) -> None:
        """Raise if the request failed."""
        if self._ending is not None and self._ending.reason is FinishReason.ERROR:
            raise ChairliftError(f"generating failed: {self._ending.detail}")

    def summary(self) -> str:
        cut_off = self._ending is not None and self._ending.reason is FinishReason.LENGTH
        times = self._token_times
        return answer_summary(
            self._arrival, times, len(times), self._prompt_tokens, self._cached_tokens, cut_off=cut_off
        )


def answer_summary(
    begun: float,
    times: Sequence[float],
    num_tokens: int,
    prompt_tokens: int | None,
    cached_tokens: int,
    *,
    cut_off: bool,
) -> str:
    """The figures of an answer in a line, given when its pieces came. `prompt_tokens` may be unknown."""
    prompt = f" · prompt of {prompt_tokens} tokens, {cached_tokens} of them cached" if prompt_tokens is not None else ""
    if not times:
        return f"no tokens{prompt}"
    count = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    if times[-1] > times[0]:
        count += f" at {(num_tokens - 1) / (times[-1] - times[0]):.1f} tokens/s"
    end = " · cut off at --max-tokens or the end of the context" if cut_off else ""
    return f"{count} · first after {times[0] - begun:.2f} s{prompt}{end}"


class StopKey:
    """Turns Ctrl-C into a KeyboardInterrupt between two steps.

    In the middle of one it would leave the scheduler half-way through its books. Made a listener of the engine,
    this raises at the end of the step instead. A second Ctrl-C does not wait.
    """

    def __init__(self) -> None:
        self._pressed = False

    def __call__(self, events: Sequence[Event]) -> None:
        if self._pressed:
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._pressed = False
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            self._pressed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
