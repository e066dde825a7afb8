"""Closing connections of clients that are still sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


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
