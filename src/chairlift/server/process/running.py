"""The running servers of this user on this machine, for `chairlift ps` and `chairlift stop`.

Each server listens on a Unix socket in a folder that only its user can enter, and answers there what it does; it also
takes the request to stop. So no process is ever found, or signalled, by a number in a file: a number may belong to
another process by now, but only the server itself answers on its socket, and once it is dead nothing does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from chairlift.machine.files import private_folder

log = logging.getLogger("chairlift.server")

SUFFIX = ".sock"
STATUS, STOP, STOP_NOW = b"status\n", b"stop\n", b"stop now\n"
ANSWER_SECONDS = 5.0  # A server that loads its tokenizer may be silent for some seconds.
MAX_ANSWER = 1 << 16
# What reaches a server that listens on these.
_ALSO = {
    "127.0.0.1": ("localhost",),
    "[::1]": ("localhost",),
    "0.0.0.0": ("localhost", "127.0.0.1"),
    "[::]": ("localhost", "127.0.0.1", "[::1]"),
}


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says about itself."""

    model: str  # its name in the API
    names: tuple[str, ...]  # all names by which it can be meant
    address: str
    started: float  # seconds since the epoch
    state: str  # starting, ready, restarting, draining, failed or stopped
    running: int = 0  # requests in the batch
    waiting: int = 0  # requests in the queue
    open: int = 0  # sequences that are not answered yet
    drain_seconds: float = 0.0  # the longest that it waits for them


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that accepts connections; `status` is None if it gave no answer in time."""

    socket: str
    pid: int  # The kernel says it; 0 if the process is in another container.
    status: ServerStatus | None
    memory: int | None = None  # bytes of the process and of all below it

    def is_meant(self, target: str) -> bool:
        """Whether `target` is its process id, one of its names, its address or the port of it."""
        if target == str(self.pid):
            return True
        if self.status is None:
            return False
        address = self.status.address
        where = address.partition("://")[2] or address
        forms = {address, where, where.removeprefix("unix:"), f":{where.rpartition(':')[2]}"}
        forms |= {form.replace(host, other) for form in forms for host, others in _ALSO.items() for other in others}
        return target.rstrip("/") in forms or target in self.status.names


# ---- the server's side ------------------------------------------------------------------------------------------


@asynccontextmanager
async def announced(status: Callable[[], ServerStatus], stop: Callable[[bool], None]) -> AsyncIterator[None]:
    """Answer on a socket while the server runs; without a folder for it the server runs all the same.

    `stop` is called with whether requests in flight are cut off.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            question = await asyncio.wait_for(reader.readline(), ANSWER_SECONDS)
            if question in (STOP, STOP_NOW):
                stop(question == STOP_NOW)
            writer.write(msgspec.json.encode(status()))
            await writer.drain()
        writer.close()

    server, path = None, Path()
    for folder in _folders():
        try:
            path = private_folder(folder) / f"{os.getpid()}{SUFFIX}"
            path.parent.chmod(0o700)
            path.unlink(missing_ok=True)
            server = await asyncio.start_unix_server(answer, path)
            break
        except OSError as error:
            log.debug("no socket for `chairlift ps` in %s: %s", folder, error)
    try:
        yield
    finally:
        if server is not None:
            server.close()
            path.unlink(missing_ok=True)


def _folders() -> Iterator[Path]:
    """Where sockets of servers may be: in the folder of the login, or, for users without one, in a temporary one."""
    if chosen := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(chosen) / "chairlift"
    else:
        login = Path(f"/run/user/{os.getuid()}")
        if login.is_dir():
            yield login / "chairlift"
    yield Path(tempfile.gettempdir()) / f"chairlift.{os.getuid()}"


# ---- the side of the commands -----------------------------------------------------------------------------------


def running_servers() -> list[RunningServer]:
    """All servers that live, the oldest first; sockets of dead ones are removed."""
    found = []
    for folder in dict.fromkeys(_folders()):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and stat.S_ISDIR(folder.lstat().st_mode):
                found += [server for path in sorted(folder.glob(f"*{SUFFIX}")) if (server := _server_at(path))]
    return sorted(found, key=lambda server: server.status.started if server.status else time.time())


def _server_at(path: Path) -> RunningServer | None:
    try:
        pid, status = _ask(path, STATUS)
    except (ConnectionRefusedError, FileNotFoundError):
        with suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        return None
    except OSError:  # It hangs.
        pid, status = _named_process(path), None
    return RunningServer(socket=str(path), pid=pid, status=status, memory=_memory_below(pid) if pid else None)


def request_stop(server: RunningServer, *, now: bool) -> ServerStatus | None:
    """Ask a server to stop, at once or once its requests are answered. None: it is gone, or did not answer."""
    try:
        return _ask(Path(server.socket), STOP_NOW if now else STOP)[1]
    except OSError:
        return None


def poll(server: RunningServer) -> tuple[bool, ServerStatus | None]:
    """Whether a server still runs, and what it says."""
    try:
        return True, _ask(Path(server.socket), STATUS)[1]
    except (ConnectionRefusedError, FileNotFoundError):
        return False, None
    except OSError:  # A server that hangs refuses connections in other ways.
        return True, None


def _ask(path: Path, question: bytes) -> tuple[int, ServerStatus | None]:
    """The process behind a socket, and its answer, if one comes; raises OSError where no process listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(str(path))
        pid = _process_behind(connection, path)
        try:
            connection.sendall(question)
            answer = b""
            while (piece := connection.recv(MAX_ANSWER)) and len(answer) < MAX_ANSWER:
                answer += piece
            return pid, msgspec.json.decode(answer, type=ServerStatus)
        except (TimeoutError, msgspec.DecodeError, ConnectionResetError):
            return pid, None


def _process_behind(connection: socket.socket, path: Path) -> int:
    """The process that listens: the kernel knows; where it does not say, the server has named its socket so."""
    if hasattr(socket, "SO_PEERCRED"):
        form = "3i"
        pid: int = struct.unpack(
            form, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
        )[0]
        return pid
    return _named_process(path)


def _named_process(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _memory_below(pid: int) -> int | None:
    """Bytes of a process and of those that it has started, each shared page counted once; None if not known."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    sizes = [size for member in family if (size := _share_of_memory(member)) is not None]
    return sum(sizes) if sizes else None


def _share_of_memory(pid: int) -> int | None:
    """The proportional set size of a process: a page that n processes share counts as an n-th."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
