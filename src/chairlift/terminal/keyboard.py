"""What is typed while an answer is printed: Ctrl-C, and other keys."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from chairlift.core.events import Event


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
