"""An answer that is printed as it is generated: its text, speed and lengths, and what is typed meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from chairlift.core.events import Event, RequestAdmitted, RequestFinished, RequestQueued, TokenProduced
from chairlift.core.request import Ending, FinishReason
from chairlift.errors import ChairliftError
from chairlift.terminal.markdown import DIM, MarkdownText
from chairlift.terminal.wrapping import WrappedText
from chairlift.text.assistant_parts import AssistantPart, ContentDelta, ReasoningDelta


def limit_reached(num_tokens: int, max_tokens: int | None) -> str:
    """Say which limit has ended an answer; without `max_tokens` it can only be the context."""
    if max_tokens is None or num_tokens < max_tokens:
        return "stopped at the end of the context"
    return f"stopped after {num_tokens} token{'s' * (num_tokens != 1)} (max_tokens)"


def can_style() -> bool:
    """Return whether standard output shows styles and drawn lines."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown") or bool(os.environ.get("NO_COLOR"))
    return sys.stdout.isatty() and encoding == "utf8" and not dumb


class AnswerText:
    """Prints an answer: on a terminal wrapped, with Markdown rendered and reasoning dimmed; elsewhere as it is."""

    def __init__(self, *, plain: bool, show_reasoning: bool) -> None:
        self._out = WrappedText() if sys.stdout.isatty() else None
        self._styles = not plain and can_style()
        self._markdown = MarkdownText(self._out) if self._out is not None and self._styles else None
        self._show_reasoning = show_reasoning
        self._in_reasoning = False
        self.has_text = False  # whether anything is printed

    def push(self, part: AssistantPart) -> None:
        self.has_text = True
        match part:
            case ReasoningDelta(text) if self._out is not None and self._show_reasoning:
                if not self._in_reasoning and not self._styles:
                    self._out.add("Reasoning:\n")
                self._in_reasoning = True
                self._out.add(text, DIM if self._styles else "")
            case ContentDelta(text):
                self._end_reasoning()
                if self._markdown is not None:
                    self._markdown.push(text)
                elif self._out is not None:
                    self._out.add(text)
                else:
                    sys.stdout.write(text)
            case _:
                pass
        sys.stdout.flush()

    def close(self, *, stopped: bool = False) -> None:
        """Write what is held back; an answer that was stopped ends in an ellipsis."""
        end = " …" if stopped else ""
        if self._out is None:
            sys.stdout.write(f"{end}\n")
        elif self._markdown is not None and not self._in_reasoning:
            self._markdown.push(end)
            self._markdown.close()
        else:
            self._out.add(end)
        if self._out is not None:
            self._out.close()
        sys.stdout.flush()

    def _end_reasoning(self) -> None:
        if self._in_reasoning and self._out is not None:
            self._out.close()
            self._out.add("\n" if self._styles else "\nAnswer:\n")
        self._in_reasoning = False


class AnswerMeter:
    """Measures the last request from the engine's events; requests must run one at a time."""

    def __init__(self, max_tokens: int | None = None) -> None:
        """`max_tokens` is that of the requests."""
        self.max_tokens = max_tokens
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
                case RequestAdmitted() if not self._token_times:
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

    @property
    def cut_off(self) -> str:
        """The limit that the answer has reached, or nothing."""
        if self._ending is None or self._ending.reason is not FinishReason.LENGTH:
            return ""
        return limit_reached(len(self._token_times), self.max_tokens)

    def summary(self) -> str:
        times = self._token_times
        return answer_summary(
            self._arrival, times, len(times), self._prompt_tokens, self._cached_tokens, cut_off=self.cut_off
        )


def answer_summary(
    started: float,
    times: Sequence[float],
    num_tokens: int,
    prompt_tokens: int | None,
    cached_tokens: int,
    *,
    cut_off: str,
) -> str:
    """Return one line about an answer whose pieces arrived at `times`; `prompt_tokens` is None if unknown."""
    prompt = f" · prompt of {prompt_tokens} tokens, {cached_tokens} of them cached" if prompt_tokens is not None else ""
    if not times:
        return f"no tokens{prompt}"
    count = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    if times[-1] > times[0]:
        count += f" at {(num_tokens - 1) / (times[-1] - times[0]):.1f} tokens/s"
    end = f" · {cut_off}" if cut_off else ""
    return f"{count} · first after {times[0] - started:.2f} s{prompt}{end}"


@contextmanager
def no_echo() -> Iterator[None]:
    """Do not show typed characters within the context; they are read, and shown, at the next prompt."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, OSError, ValueError, termios.error):  # no terminal, or not a Unix system
        yield
        return
    local_modes = 3  # position in the attributes
    silent = [*before]
    silent[local_modes] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class InterruptBetweenSteps:
    """Turns Ctrl-C into a KeyboardInterrupt between two steps.

    Within a step, an exception would leave the scheduler's state inconsistent. As a listener of the engine, this raises
    at the end of the step instead. A second Ctrl-C raises at once.
    """

    def __init__(self) -> None:
        self._pressed = False

    def __call__(self, events: Sequence[Event]) -> None:
        if self._pressed:
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Handle Ctrl-C in this way within the context."""
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
