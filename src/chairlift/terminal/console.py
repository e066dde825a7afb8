"""Output of the commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.text import Text

# Escape sequences in a model's output, or in an error that quotes its files, could reprogram the terminal.
_CONTROL_CODES = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


def write_text(text: str) -> None:
    """Print a piece of a model's output at once, without control characters on a terminal."""
    sys.stdout.write(text.translate(_CONTROL_CODES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(message: str, style: str = "dim") -> None:
    """Print a line about progress."""
    # A new console each time, since sys.stderr may have been replaced.
    Console(stderr=True, soft_wrap=True).print(Text(message.translate(_CONTROL_CODES), style))


def show_error(message: str) -> None:
    shown = Text.assemble(("error: ", "bold red"), (message.translate(_CONTROL_CODES), "red"))
    Console(stderr=True, soft_wrap=True).print(shown)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(record.getMessage())
        except Exception:  # A log on a full disk must not fail what is logged.
            self.handleError(record)


def show_log(*, quiet: bool) -> None:
    """Print the engine's log as notes; only warnings if `quiet`."""
    log = logging.getLogger("chairlift")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [_Notes()]
