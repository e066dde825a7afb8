"""A program under another Python, which reads a job file and writes lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

CHECK_SECONDS = 60.0  # to say which version of its package a Python has
PROGRAMS = Path(__file__).parent / "programs"
QUOTED = 400  # characters of standard error in the message of a failure
LAST_LINES = 100  # lines of standard error that a failure keeps


class PeerFailed(Exception):
    """A peer failed; the message gives the reason, `output` the end of its standard error."""

    def __init__(self, problem: str, output: str = "") -> None:
        super().__init__(problem)
        self.output = output


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """One call of a program in `programs`; its child processes end with it."""

    python: Path
    program: str
    timeout: float  # seconds
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, job: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Run it on a job, which also gets the time of its start; see `ask`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "job.json"
            file.write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
            return self.ask(str(file), progress=progress)

    def ask(self, *arguments: str, progress: Callable[[dict[str, Any]], None] = lambda line: None) -> dict[str, Any]:
        """Run it and return its last line; `progress` is called with each line."""
        command = [str(self.python), str(PROGRAMS / self.program), *arguments]
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=self._environment(),
                    start_new_session=True,  # so that its children can be ended too
                )
            except OSError as error:
                raise PeerFailed(f"cannot start {self.python} ({error.strerror})") from None
            return self._listen(process, errors, progress)

    def _listen(
        self, process: subprocess.Popen[str], errors: IO[bytes], progress: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _end(process)

        clock = threading.Timer(self.timeout, give_up)
        clock.daemon = True
        clock.start()
        last: dict[str, Any] | None = None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = self._parse(line)
                progress(last)
            code = process.wait()
        finally:
            clock.cancel()
            _end(process)
        if late.is_set():
            raise PeerFailed(f"did not finish within {self.timeout:g} s", "\n".join(_lines(errors)[-LAST_LINES:]))
        if code != 0 or last is None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            lines = _lines(errors)
            raise PeerFailed(f"{how}: {_end_of(lines)}", "\n".join(lines[-LAST_LINES:]))
        return last

    def _parse(self, line: str) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise PeerFailed(f"answered {line.strip()[:QUOTED]!r}, which is no JSON object")
        return content

    def _environment(self) -> dict[str, str]:
        inherited = dict(os.environ)
        if self.python != Path(sys.executable):
            for name in ("PYTHONPATH", "PYTHONHOME"):  # they point to our packages, not to the peer's
                inherited.pop(name, None)
        return inherited | dict(self.environment)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(errors: IO[bytes]) -> list[str]:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def _end_of(lines: Sequence[str]) -> str:
    text = " ".join(line.strip() for line in lines[-3:])
    return text[-QUOTED:] or "without any output"
