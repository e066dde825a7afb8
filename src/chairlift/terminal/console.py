"""Output of the commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.text import Text

# Escape sequences in a model's output, or in an error that quotes its files, could reprogram the terminal. The last
# ones turn the direction of the text around them, so that a command reads as another one.
_CONTROL_CODES = dict.fromkeys(
    code
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
)


def without_controls(text: str) -> str:
    """Return a text without the characters that control a terminal."""
    return text.translate(_CONTROL_CODES)


def write_text(text: str) -> None:
    """Print a piece of a model's output at once, without control characters on a terminal."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(message: str, style: str = "dim") -> None:
    """Print a line about progress."""
    # A new console each time, since sys.stderr may have been replaced.
    Console(stderr=True, soft_wrap=True).print(Text(without_controls(message), style))


def show_error(message: str) -> None:
    shown = Text.assemble(("error: ", "bold red"), (without_controls(message), "red"))
    Console(stderr=True, soft_wrap=True).print(shown)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(record.getMessage())
        except Exception:  # A log on a full disk must not fail what is logged.
            self.handleError(record)


def show_log(*, quiet: bool, verbose: bool = False) -> None:
    """Print the engine's warnings as notes; with `verbose` all that it says, and only errors if `quiet`."""
    log = logging.getLogger("chairlift")
    log.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    log.handlers = [_Notes()]
