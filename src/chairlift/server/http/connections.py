"""The open connections of a server: fewer than its limit on open files allows, and a share of them for each address.

When the limit is reached, a new connection takes the place of the one that has been idle for longest, or else of the
one whose request has been arriving for longest, or else of the one whose client has left its buffer full for longest.
A connection whose request is being answered is otherwise never closed for another: if all are, the new one is refused.

To uvicorn's protocol this adds: time limits on headers, on the rest of a body after its response, and on clients that
stop reading; detection of a disconnect while further requests are queued behind the one in flight; OpenAI's error
format for malformed HTTP; responses that reach clients which are still sending; and the phase of each connection.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.wire.errors import APIError, unavailable
from chairlift.server.wire.limits import Limits

log = logging.getLogger("chairlift.server")

BACKLOG = 2048  # connections that wait in the kernel to be accepted
ACCEPTS_AT_ONCE = 64  # No other event is handled between them.
SHARED_ACCEPTS_AT_ONCE = 1  # leaves the other connections to other processes
RETRY_SECONDS = 1.0  # The next attempt to accept waits so long if no file descriptor can be freed.
ADDRESS_SHARE = 0.75  # One address may have this share of the connections.

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ConnectionPhase(IntEnum):
    """What a connection waits for. Those of a lower phase are closed first."""

    IDLE = 0  # a request
    RECEIVING = 1  # the rest of a request
    SENDING = 2  # the client, which has to read what fills the buffer
    BUSY = 3  # a response


@dataclass(eq=False)
class Connection:
    """An accepted connection."""

    address: str
    on_phase: Callable[[Connection, ConnectionPhase], None]
    abort: Callable[[], object] = lambda: None
    phase: ConnectionPhase = ConnectionPhase.BUSY  # It stays so until `abort` is known.
    is_open: bool = True

    def enter(self, phase: ConnectionPhase) -> None:
        if phase is not self.phase:
            self.on_phase(self, phase)


class _Group:
    """Connections, and those among them that can be closed, in the order in which they entered their phase."""

    def __init__(self) -> None:
        self.size = 0
        self._waiting: tuple[dict[Connection, None], ...] = ({}, {}, {})  # those of each phase before BUSY

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

    def add(self, address: str) -> Connection | None:
        """Add a new connection of an address, which is empty for Unix sockets. At a limit, another connection is closed
        for it; return None if none can be."""
        if self._has_its_share(address):
            has_room = self.close_oldest(self._by_address[address])
        else:
            has_room = self._all.size < self.limit or self.close_oldest()
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

    def close_oldest(self, group: _Group | None = None) -> bool:
        """Close the connection that has waited longest, in a group or of all; return whether there is one."""
        oldest = (group or self._all).oldest()
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
        if self._transport.can_write_eof():  # TLS cannot.
            self._transport.write_eof()
        with suppress(RuntimeError):  # it was not paused
            self._transport.resume_reading()

    def stop_lingering(self) -> None:
        """Close the connection now."""
        if self._timer is not None:
            self._timer.cancel()
            self._transport.close()


MAX_PIPELINED = 64 * 2**10  # bytes of pipelined requests read while one is in flight


class GuardedProtocol(H11Protocol):
    def __init__(
        self, *args: Any, limits: Limits, connections: Connections, connection: Connection, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._open_connections = connections
        self._connection = connection
        self._read_timer = _Timer()  # runs while the server waits for data
        self._write_timer = _Timer()  # runs while the client has data to read

    # ---- reading -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self._is_receiving, self._limits.linger_seconds)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        self._connection.abort = transport.abort
        self._limit_reading()

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering:
            return
        self._write_timer.stop()  # data from the client shows that it is alive
        super().data_received(data)
        self._keep_listening()
        self._limit_reading()
        self._limit_writing()
        self._note_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_reading()
        self._limit_writing()
        self._note_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.remove(self._connection)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._lingering.stop_lingering()
        self._read_timer.stop()
        self._write_timer.stop()

    def _note_phase(self) -> None:
        """Tell what the connection waits for."""
        if self.flow.write_paused:
            phase = ConnectionPhase.SENDING
        elif self.cycle is None or self.cycle.response_complete:
            phase = ConnectionPhase.IDLE
        elif self.cycle.more_body:
            phase = ConnectionPhase.RECEIVING
        else:
            phase = ConnectionPhase.BUSY
        self._connection.enter(phase)

    def _is_receiving(self) -> bool:
        """Whether the client may be sending the rest of a request."""
        if self.conn.their_state is h11.IDLE:
            return bool(self.conn.trailing_data[0])
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _keep_listening(self) -> None:
        """Resume reading, which uvicorn pauses when a pipelined request arrives, to detect a disconnect."""
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_PIPELINED:
            self.flow.resume_reading()

    def _limit_reading(self) -> None:
        """Run one timer per expected message, which partial data does not restart."""
        if not self._is_sending or self.transport.is_closing():
            self._read_timer.stop()
        else:
            self._read_timer.start(self._limits.header_seconds, self._too_slow)

    @property
    def _is_sending(self) -> bool:
        if self.conn.their_state is h11.IDLE:  # expects headers; between requests, the keep-alive timer applies
            return self.cycle is None or bool(self.conn.trailing_data[0])
        # Expects the rest of a body after its response.
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _too_slow(self) -> None:
        if not self.conn.trailing_data[0]:  # no data, so no response
            self.transport.close()
            return
        self._refuse(APIError(408, "the request did not arrive in time", type_="timeout_error", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError(400, "this is not a valid HTTP request, or its headers are too large", code="bad_http"))

    def _refuse(self, error: APIError) -> None:
        """Send an error, if a response can still be sent, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            request_id = f"req-{uuid.uuid4().hex}"
            # It is not certain which API the client speaks, so this has the form of OpenAI's and of Anthropic's errors.
            body = {"type": "error", **error.body, "request_id": request_id}
            response = JSONResponse(body, headers={"x-request-id": request_id, "request-id": request_id})
            headers = response.raw_headers
            head = h11.Response(status_code=error.status_code, headers=[*headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._limit_writing()

    # ---- writing -----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_writing()
        self._note_phase()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()
        self._note_phase()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_writing()

    def shutdown(self) -> None:
        super().shutdown()
        self._lingering.stop_lingering()
        self._limit_writing()

    def _limit_writing(self) -> None:
        """Require the client to read half of what waits for it in each interval: clients that read a byte at a time
        would keep hundreds of large responses in memory."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._write_timer.start(self._limits.stall_seconds, partial(self._check_writing, unread))

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() > before // 2:
            self.transport.abort()
        else:
            self._limit_writing()


class _Timer:
    """Runs an action once after a delay, unless stopped. Starting it while it runs has no effect."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, action: Callable[[], None]) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(seconds, self._fire, action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, action: Callable[[], None]) -> None:
        self._handle = None
        action()
