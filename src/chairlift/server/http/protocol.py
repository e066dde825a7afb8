"""HTTP connections that no client can hold open for nothing.

uvicorn speaks HTTP; this adds what it leaves out: a time limit on headers, on a body nobody waits for any more, and on
a client that has stopped reading; a disconnect that is noticed even while further requests are queued behind the one
under way; and errors below HTTP in the same shape as all others.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.http.errors import APIError
from chairlift.server.limits import Limits

MAX_PIPELINED = 64 * 2**10  # bytes of further requests that are read while one is under way


class GuardedProtocol(H11Protocol):
    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._reading = _Timer()  # runs while the client owes us something
        self._writing = _Timer()  # runs while it does not take what it asked for

    # ---- what the client sends -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_reading()

    def data_received(self, data: bytes) -> None:
        self._writing.stop()  # whoever speaks is there
        super().data_received(data)
        self._keep_listening()
        self._watch_reading()
        self._watch_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reading()
        self._watch_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._reading.stop()
        self._writing.stop()

    def _keep_listening(self) -> None:
        """With a further request behind the one under way, uvicorn stops reading, and would not see the client go."""
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_PIPELINED:
            self.flow.resume_reading()

    def _watch_reading(self) -> None:
        """One timer for one thing awaited; that some bytes of it come does not wind it up again."""
        if not self._owes_something or self.transport.is_closing():
            self._reading.stop()
        else:
            self._reading.start(self._limits.header_seconds, self._too_slow)

    @property
    def _owes_something(self) -> bool:
        if self.conn.their_state is h11.IDLE:  # headers; between two requests, the keep-alive timer is enough
            return self.cycle is None or bool(self.conn.trailing_data[0])
        # The rest of a body whose request has been answered already.
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _too_slow(self) -> None:
        if not self.conn.trailing_data[0]:  # nothing was said, so there is nothing to answer
            self.transport.close()
            return
        self._refuse(APIError(408, "the request did not arrive in time", type_="timeout_error", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError(400, "this is not a valid HTTP request, or its headers are too large", code="bad_http"))

    def _refuse(self, error: APIError) -> None:
        """Answer what never became a request, if there is still a place for an answer, and hang up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            response: Response = error.response()
            headers = [*response.raw_headers, (b"x-request-id", f"req-{uuid.uuid4().hex}".encode())]
            head = h11.Response(status_code=error.status_code, headers=[*headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._watch_writing()

    # ---- what the client reads -----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.stop()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_writing()

    def shutdown(self) -> None:
        super().shutdown()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """As long as something is unread, the client has to read a little of it now and then."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._writing.start(self._limits.stall_seconds, partial(self._check_writing, unread))

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_writing()


class _Timer:
    """Does something once, after a while, unless stopped. Starting it while it runs changes nothing."""

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
