"""HTTP connections with time limits, so that idle clients cannot hold them open.

Adds to uvicorn: time limits on headers, on the rest of a body after its response, and on clients that stop reading;
detection of a disconnect while further requests are queued behind the one in flight; OpenAI's error format for
malformed HTTP; responses that reach clients which are still sending; and the phase of each connection, by which idle
ones are closed for others.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.http.connections import Connection, ConnectionPhase, Connections, LingeringTransport
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.limits import Limits

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
        if self.cycle is None or (self.cycle.response_complete and not self.flow.write_paused):
            phase = ConnectionPhase.IDLE
        elif self.cycle.more_body and not self.cycle.response_complete:
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
        """Require the client to read some data in each interval while its buffer is not empty."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._write_timer.start(self._limits.stall_seconds, partial(self._check_writing, unread))

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
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
