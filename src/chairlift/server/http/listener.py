"""The socket that the server listens on, its certificate, and the HTTP server on it."""

from __future__ import annotations

import errno
import logging
import math
import socket
import ssl
import stat
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.machine.files import connection_limit
from chairlift.server.http.connections import Acceptor, Connections, GuardedProtocol
from chairlift.server.wire.limits import Limits


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of a TLS certificate."""

    certfile: Path
    keyfile: Path | None = None  # None: the key is in `certfile`

    def check(self) -> None:
        """Raise unless the files hold a certificate and its key."""
        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load_into(self, context: ssl.SSLContext) -> None:
        """Read the files; new connections use them from then on."""
        for name, file in (("ssl_certfile", self.certfile), ("ssl_keyfile", self.keyfile)):
            if file is not None and not file.is_file():
                raise InvalidParameter(name, f"there is no file {str(file)!r}")
        try:
            # An empty password makes an encrypted key an error instead of a question on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ssl.SSLError) as error:
            problem = f"no certificate and matching unencrypted key in {str(self.certfile)!r}"
            within = f" and {str(self.keyfile)!r}" if self.keyfile else ""
            raise InvalidParameter("ssl_certfile", f"{problem}{within} ({error.strerror or error})") from None


def listen(host: str, port: int, uds: Path | None = None, *, shared: bool = False) -> socket.socket:
    """Bind the socket before the engine is started, so that a port in use is reported at once.

    `shared`: whether other processes may listen on the same port, each with a socket of its own.
    """
    if uds is not None:
        return _listen_on_path(uds)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, reuse_port=shared)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from None
    # Connections inherit it. asyncio sets it only on sockets made for TCP by name; without it, a token may wait 40 ms
    # for the client's acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> InvalidParameter:
    """Return an error that names the option that is wrong."""
    if not isinstance(error, OSError):
        return InvalidParameter("host", f"cannot listen on {host!r}: this is not the name of a host")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        problem = f"cannot listen on {host!r}: {error.strerror}; give an address of this machine, or 0.0.0.0 for all"
        return InvalidParameter("host", problem)
    if error.errno == errno.EADDRINUSE:
        problem = f"{port} is in use on {host}; choose another, such as {port % 65535 + 1}, or 0 for a free one"
        return InvalidParameter("port", problem)
    if error.errno == errno.EACCES:
        return InvalidParameter("port", f"{port} is not for this user: choose one above 1023, such as 8000")
    return InvalidParameter("port", f"cannot listen on {host} port {port}: {error.strerror}; choose another")


def _listen_on_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_abandoned(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InvalidParameter("uds", f"cannot listen on {str(path)!r}: {error.strerror or error}") from None
    return listener


def _is_abandoned(path: Path) -> bool:
    """Return whether this is a socket that no process listens on any more."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0


def listening_address(listener: socket.socket, host: str, *, secure: bool) -> str:
    """Return the address as clients write it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{listener.getsockname()[1]}"


# ---- the server ------------------------------------------------------------------------------------------------------


class UvicornServer(uvicorn.Server):
    """A server that limits its connections, and leaves signals to its owner."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        certificate: Certificate | None = None,
        *,
        shared: bool = False,
        files_per_connection: int = 1,
    ) -> None:
        """`shared`: whether other processes accept connections from the same socket."""
        config = uvicorn.Config(
            app,
            http="h11",
            lifespan="on",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(limits.keep_alive_seconds),
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            ssl_certfile=None if certificate is None else certificate.certfile,
            ssl_keyfile=None if certificate is None else certificate.keyfile,
        )
        super().__init__(config)
        self._limits = limits
        self._shared = shared
        self._log_limit = LogLimit()
        self._connections = Connections(connection_limit(limits.max_connections, files_per_connection))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._log_limit.apply()
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise ChairliftError("the HTTP server cannot start; the log says why")
        make_protocol = partial(
            GuardedProtocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            limits=self._limits,
            connections=self._connections,
        )
        self.servers: list[Any] = [
            Acceptor(
                listener,
                self._connections,
                make_protocol,
                self.config.ssl,
                handshake_seconds=self._limits.header_seconds,
                shared=self._shared,
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._log_limit.remove()

    def capture_signals(self) -> Any:
        """Disable uvicorn's signal handlers, which would stop without draining; see `lifecycle`."""
        return nullcontext()


LOGGERS = ("asyncio", "chairlift.cluster", "chairlift.server", "python_multipart.multipart", "uvicorn.error")
MAX_LINES = 10  # One statement of the program may log as many.
PERIOD_SECONDS = 60.0


class LogLimit(logging.Filter):
    """Passes at most MAX_LINES records of one statement in a period; the next period says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[tuple[str, int], tuple[float, int]] = {}  # when it began, and the records since then

    def apply(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self)

    def remove(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), time.monotonic()
        start, count = self._periods.get(place, (now, 0))
        if now - start >= PERIOD_SECONDS:
            if count > MAX_LINES:
                record.msg = f"{record.getMessage()} ({count - MAX_LINES} more such lines were left out)"
                record.args = None
            start, count = now, 0
        self._periods[place] = start, count + 1
        return count < MAX_LINES
