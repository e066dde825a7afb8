"""What is typed while an answer is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
