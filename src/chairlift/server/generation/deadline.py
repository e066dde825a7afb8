"""The time limit of a request, counted from its arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chairlift.errors import InvalidParameter
from chairlift.server.http.errors import timed_out


class Deadline:
    def __init__(self, arrived: float, timeout: float | None) -> None:
        """`arrived` is a time of the monotonic clock; without a timeout there is no deadline."""
        if timeout is not None and not timeout > 0:
            raise InvalidParameter("timeout", f"must be a number of seconds above 0, got {timeout!r}")
        self._end = None if timeout is None else arrived + timeout

    def seconds_left(self) -> float | None:
        """Return the seconds left; raises a 408 error once the deadline has passed."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise timed_out()
        return left

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the body of the `async with` and raise a 408 error when the deadline passes."""
        try:
            async with asyncio.timeout(self.seconds_left()):
                yield
        except TimeoutError:
            raise timed_out() from None
