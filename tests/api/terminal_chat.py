"""A program under a pseudo-terminal, and a server that sends scripted answers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import socketserver
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class TerminalProgram:
    """`chairlift` with a terminal of its own, to which real bytes are typed."""

    def __init__(self, *arguments: str, columns: int = 60, piped: bool = False, **variables: str) -> None:
        """`piped` leaves the terminal to standard input and errors."""
        self._master, slave = pty.openpty()
        self.resize(columns)
        self.output = ""
        self._waited_to = 0  # in `shown`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chairlift", *arguments],
            stdin=slave,
            stdout=subprocess.PIPE if piped else slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that \x03 is Ctrl-C
            env={
                **os.environ,
                "TERM": "xterm-256color",
                "LC_ALL": "C.UTF-8",
                "NO_COLOR": "",
                "COLUMNS": "",
                **variables,
            },
        )
        os.close(slave)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C. Python handles it at the next key if it comes just before readline waits for one."""
        time.sleep(0.3)
        self.type("\x03")

    @property
    def shown(self) -> str:
        """The output without styles."""
        return CODES.sub("", self.output).replace("\r", "")

    def wait_for(self, text: str) -> str:
        """Return what is shown since the last call, up to the text; fails if it does not come."""
        end = time.monotonic() + 60
        while (found := self.shown.find(text, self._waited_to)) < 0:
            if time.monotonic() > end or not self._read():
                raise AssertionError(f"no {text!r} in {self.output!r}")
        begin, self._waited_to = self._waited_to, found + len(text)
        return self.shown[begin : self._waited_to]

    def ended(self) -> int:
        """Return the exit status, after reading what is left."""
        while self._read(10):
            pass
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float = 0.2) -> bool:
        if select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # The program has ended.
                return False
            self.output += data.decode(errors="replace")
        return True


class ScriptedServer(socketserver.ThreadingTCPServer):
    """Answers chat requests with the deltas in `answer`; a None among them waits until the client has gone."""

    allow_reuse_address = daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Sequence[str | dict[str, str] | None] = ("Hello there.",)
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._begin()
        self.wfile.write(b'{"data": [{"id": "scripted"}]}')

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._begin()
        try:
            for delta in self.server.answer:
                while delta is None:
                    self._send({"content": ""})
                    time.sleep(0.01)
                self._send({"content": delta} if isinstance(delta, str) else delta)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            return

    def _send(self, delta: dict[str, str]) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
