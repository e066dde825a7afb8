"""The time that a request may take, counted from its arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chairlift.errors import InvalidParameter
from chairlift.server.http.errors import timed_out


class Deadline:
    def __init__(self, arrived: float, timeout: float | None) -> None:
        """`arrived` is of the monotonic clock; without a timeout there is all the time in the world."""
        if timeout is not None and not timeout > 0:
            raise InvalidParameter("timeout", f"must be a number of seconds above 0, got {timeout!r}")
        self._end = None if timeout is None else arrived + timeout

    def seconds_left(self) -> float | None:
        """Above 0: when there are none left, this raises."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise timed_out()
        return left

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """What is done within is dropped when there is no time left for it."""
        try:
            async with asyncio.timeout(self.seconds_left()):
                yield
        except TimeoutError:
            raise timed_out() from None
