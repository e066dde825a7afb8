"""Messages that are typed: line editing, history, pasted text and messages of several lines.

Readline does it: it comes with Python and knows bracketed paste, wide characters and resizes. Where it is missing, or
is editline, which knows no bracketed paste, the lines that arrive at once are one message.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from chairlift.machine.files import create_private, open_private, private_folder
from chairlift.terminal.console import note, without_controls

PROMPT, CONTINUED = "> ", "… "
QUOTES = '"""'
MAX_ENTRIES = 1000
MAX_ENTRY = 20_000  # characters; a longer message is not kept
MAX_FILE = 4 * 2**20  # bytes
PASTE_SECONDS = 0.02  # The lines of a paste are no further apart.

_BINDINGS = (
    "set enable-bracketed-paste on",
    "set blink-matching-paren off",
    r'"\e\C-m": "\C-v\C-j"',  # Alt-Enter inserts a line break
    r'"\e\C-j": "\C-v\C-j"',
    "tab: complete",
)


class LeaveChat(Exception):
    """Ctrl-D, or Ctrl-C twice."""


class MessageReader:
    """Reads messages from the terminal."""

    def __init__(self, history: History | None, complete: Callable[[str], Sequence[str]]) -> None:
        """`complete` returns what the beginning of a line may become."""
        self._history = history
        self._readline = _readline()
        self._interrupted = False  # whether Ctrl-C was the last key
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # what is typed need not be UTF-8
        if self._readline is not None:
            self._set_up(self._readline, complete)

    def _set_up(self, readline: Any, complete: Callable[[str], Sequence[str]]) -> None:
        readline.set_auto_history(False)
        readline.set_completer_delims("")
        readline.set_completer(lambda text, state: dict(enumerate(complete(text))).get(state))
        for binding in _BINDINGS if _knows_paste(readline) else ("bind ^I rl_complete",):
            readline.parse_and_bind(binding)
        for entry in self._history.entries() if self._history is not None else ():
            readline.add_history(entry)

    def read(self) -> str:
        """Return the next message, which may be empty; raises LeaveChat."""
        try:
            text = self._read_message()
        except EOFError:
            sys.stderr.write("\n")
            raise LeaveChat from None
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            self._stop_or_leave()
            return ""
        self._interrupted = False
        message = text.strip("\n").rstrip()
        # A space before a message keeps it out of the history, as in shells.
        if message.strip() and not text.startswith(" "):
            if self._readline is not None:
                self._readline.add_history(message)
            if self._history is not None:
                self._history.add(message)
        return message if "\n" in message else message.strip()

    def _stop_or_leave(self) -> None:
        """Handle Ctrl-C: it drops what is typed; with nothing typed, it asks and then leaves."""
        typed = self._readline is not None and self._readline.get_line_buffer()
        if self._interrupted and not typed:
            raise LeaveChat
        self._interrupted = not typed
        if not typed:
            note("To leave, press Ctrl-C again or Ctrl-D, or type /quit.")

    def _read_message(self) -> str:
        text = self._read_lines(PROMPT)
        if text.lstrip().startswith(QUOTES):
            text = text.lstrip()[len(QUOTES) :]
            with suppress(EOFError):
                while not text.rstrip().endswith(QUOTES):
                    text += "\n" + self._read_lines(CONTINUED)
            return text.rstrip().removesuffix(QUOTES)
        with suppress(EOFError):
            while text.endswith("\\"):
                text = text[:-1] + "\n" + self._read_lines(CONTINUED)
        return text

    def _read_lines(self, prompt: str) -> str:
        """Read a line, or the lines of a paste."""
        pasted_later = _has_input(0)  # What was typed during an answer is no paste.
        text = self._input(prompt)
        if not _knows_paste(self._readline) and not pasted_later:
            while _has_input(PASTE_SECONDS):
                text += "\n" + self._input("")
        return text

    def _input(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        sys.stderr.write(prompt)  # The answers go elsewhere, and the prompt should not.
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def _readline() -> Any:
    try:
        import readline
    except ImportError:  # Not every Python build has it.
        return None
    return readline if sys.stdout.isatty() else None


def _knows_paste(readline: Any) -> bool:
    return readline is not None and "libedit" not in (readline.__doc__ or "") and os.environ.get("TERM") != "dumb"


def _has_input(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


class History:
    """The messages of earlier conversations, in a file that only this user can read."""

    def __init__(self) -> None:
        self._entries: list[str] = []
        try:
            self._file = _history_file()
            private_folder(self._file.parent)
            with suppress(FileNotFoundError):
                self._entries = self._read()
        except (OSError, RuntimeError) as error:  # The latter is raised where there is no home.
            note(f"No history: {error}")
            self._file = Path(os.devnull)

    def entries(self) -> list[str]:
        return self._entries

    def add(self, entry: str) -> None:
        if len(entry) > MAX_ENTRY:
            return
        with suppress(OSError):
            file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")

    def _read(self) -> list[str]:
        """Read the last entries, and write the file anew where it has more."""
        with os.fdopen(open_private(self._file), "rb") as file:
            os.fchmod(file.fileno(), 0o600)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MAX_FILE))
            lines = file.read(MAX_FILE).splitlines()
        entries = [entry for line in lines if (entry := _entry(line))]
        if len(lines) > 2 * MAX_ENTRIES or size > MAX_FILE:
            entries = entries[-MAX_ENTRIES:]
            with os.fdopen(create_private(self._file), "w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        return entries[-MAX_ENTRIES:]


def _entry(line: bytes) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return without_controls(entry.encode(errors="replace").decode()) if isinstance(entry, str) else ""


def _history_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "chairlift" / "chat_history.jsonl"
