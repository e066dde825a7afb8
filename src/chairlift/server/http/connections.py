"""The open connections of a server: fewer than its limit on open files allows, and a share of them for each address.

When the limit is reached, a new connection takes the place of the one that has been idle for longest, or else of the
one whose request has been arriving for longest. A connection whose request is being answered is never closed for
another: if all are, the new one is refused.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any

from chairlift.server.wire.errors import unavailable

log = logging.getLogger("chairlift.server")

BACKLOG = 2048  # connections that wait in the kernel to be accepted
ACCEPTS_AT_ONCE = 64  # between which no other event is handled
SHARED_ACCEPTS_AT_ONCE = 1  # leaves the other connections to other processes
RETRY_SECONDS = 1.0  # until the next attempt to accept when no file descriptor can be freed
ADDRESS_SHARE = 0.75  # One address may have this share of the connections.

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ConnectionPhase(IntEnum):
    """What a connection waits for. Those of a lower phase are closed first."""

    IDLE = 0  # a request
    RECEIVING = 1  # the rest of a request
    BUSY = 2  # a response


class Connection:
    """An accepted connection."""

    def __init__(self, address: str, on_phase: Callable[[Connection, ConnectionPhase], None]) -> None:
        self.address = address
        self.is_open = True
        self.phase = ConnectionPhase.BUSY  # until `abort` is known
        self.abort: Callable[[], object] = lambda: None
        self._on_phase = on_phase

    def enter(self, phase: ConnectionPhase) -> None:
        if phase is not self.phase:
            self._on_phase(self, phase)


class _Group:
    """Connections, and those among them that can be closed, in the order in which they entered their phase."""

    def __init__(self) -> None:
        self.size = 0
        self._waiting: tuple[dict[Connection, None], dict[Connection, None]] = ({}, {})

    def move(self, connection: Connection, phase: ConnectionPhase) -> None:
        self.drop(connection)
        if phase is not ConnectionPhase.BUSY:
            self._waiting[phase][connection] = None

    def drop(self, connection: Connection) -> None:
        if connection.phase is not ConnectionPhase.BUSY:
            self._waiting[connection.phase].pop(connection, None)

    def oldest(self) -> Connection | None:
        return next((next(iter(waiting)) for waiting in self._waiting if waiting), None)


class Connections:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.limit_per_address = max(1, int(limit * ADDRESS_SHARE))
        self._all = _Group()
        self._by_address: dict[str, _Group] = {}

    def __len__(self) -> int:
        return self._all.size

    def add(self, address: str) -> Connection | None:
        """Add a new connection of an address, which is empty for Unix sockets. At a limit, another connection is closed
        for it; return None if none can be."""
        if self._has_its_share(address):
            has_room = self._close_oldest(self._by_address[address])
        else:
            has_room = self._all.size < self.limit or self._close_oldest(self._all)
        if not has_room:
            return None
        connection = Connection(address, self._move)
        self._all.size += 1
        self._by_address.setdefault(address, _Group()).size += 1
        return connection

    def is_crowded(self, address: str) -> bool:
        """Return whether the next connection of an address takes the place of another one."""
        return self._all.size >= self.limit or self._has_its_share(address)

    def _has_its_share(self, address: str) -> bool:
        group = self._by_address.get(address)
        return group is not None and address != "" and group.size >= self.limit_per_address

    def close_oldest(self) -> bool:
        """Close the connection that has waited longest; return whether there is one."""
        return self._close_oldest(self._all)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed; a second time has no effect."""
        if not connection.is_open:
            return
        connection.is_open = False
        group = self._by_address[connection.address]
        for one in (self._all, group):
            one.drop(connection)
            one.size -= 1
        if not group.size:
            del self._by_address[connection.address]

    def _close_oldest(self, group: _Group) -> bool:
        oldest = group.oldest()
        if oldest is None:
            return False
        log.warning("the limit of connections is reached: closing those that are idle; see --max-connections")
        self.remove(oldest)
        oldest.abort()
        return True

    def _move(self, connection: Connection, phase: ConnectionPhase) -> None:
        if connection.is_open:
            self._all.move(connection, phase)
            self._by_address[connection.address].move(connection, phase)
            connection.phase = phase


class Acceptor:
    """Accepts the connections of a listening socket within the limits.

    asyncio's own server knows no limit, and answers the lack of file descriptors with a traceback for each connection
    that waits. uvicorn uses two methods of it, which are here, too.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[..., asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
        *,
        handshake_seconds: float,
        shared: bool = False,
    ) -> None:
        """`shared`: whether other processes accept connections from the same socket."""
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._accepts_at_once = SHARED_ACCEPTS_AT_ONCE if shared else ACCEPTS_AT_ONCE
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Return at once: `close` closes the socket itself."""

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(self._accepts_at_once):
            try:
                accepted, address = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_room(error)
                return  # otherwise no connection waits, or one has failed already
            host = _host(accepted, address)
            connection = self._connections.add(host)
            if connection is None:
                _refuse(accepted, secure=self._tls is not None)
                return
            task = self._loop.create_task(self._connect(accepted, connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            if self._connections.is_crowded(host):
                return  # the event loop has to close connections and to start new ones before more are accepted

    def _make_room(self, error: OSError) -> None:
        log.error("cannot accept a connection: %s; see --max-connections", error.strerror)
        if not self._connections.close_oldest():
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        """Make the protocol of a connection, which looks after it once it is secure."""
        task = asyncio.current_task()
        assert task is not None
        connection.abort = task.cancel
        connection.enter(ConnectionPhase.IDLE)
        seconds = None if self._tls is None else self._handshake_seconds
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make_protocol, connection=connection),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=seconds,
            )
        except (OSError, asyncio.CancelledError):  # the client left, is no TLS client, or was closed for another one
            self._connections.remove(connection)
            accepted.close()


def _host(accepted: socket.socket, address: object) -> str:
    """Return the address that shares are counted by: of IPv6 the network, since a client has all of its addresses."""
    if accepted.family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
        return ""
    host = str(address[0])
    if ":" not in host:
        return host
    ip = ipaddress.IPv6Address(host)
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip), 64), strict=False))


def _refuse(accepted: socket.socket, *, secure: bool) -> None:
    """Close a connection for which there is no room, with a response where one can be sent at once."""
    log.warning("the limit of connections is reached, and none of them is idle: refusing more; see --max-connections")
    with accepted, suppress(OSError):
        accepted.setblocking(False)
        if secure:
            return
        with suppress(BlockingIOError):
            accepted.recv(2**16)  # a connection that is closed before its data is read would lose the response
        response = unavailable("the server has too many connections").response()
        headers = [b"%s: %s\r\n" % header for header in (*response.raw_headers, (b"connection", b"close"))]
        head = b"HTTP/1.1 503 Service Unavailable\r\n" + b"".join(headers) + b"\r\n"
        accepted.sendall(head + bytes(response.body))
        accepted.shutdown(socket.SHUT_WR)


class LingeringTransport:
    """A transport whose `close` lets the client finish sending first.

    Closing a socket with unread data resets the connection, and a client that is still sending a large body then loses
    the response that refuses it. So `close` ends only the outgoing direction; incoming data is discarded until the
    client ends, too, or `seconds` have passed.
    """

    def __init__(self, transport: asyncio.Transport, is_receiving: Callable[[], bool], seconds: float) -> None:
        """`is_receiving` tells whether the client may still be sending."""
        self._transport = transport
        self._is_receiving = is_receiving
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        """Whether incoming data is to be discarded."""
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_receiving():
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        with suppress(RuntimeError):  # it was not paused
            self._transport.resume_reading()

    def stop_lingering(self) -> None:
        """Close the connection now."""
        if self._timer is not None:
            self._timer.cancel()
            self._transport.close()
