"""The socket that the server listens on, and its certificate."""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import InvalidParameter


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
    return InvalidParameter(
        "port", f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
    )


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
