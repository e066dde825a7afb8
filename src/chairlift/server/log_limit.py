"""A limit on log lines, so that strangers cannot fill a disk with what they do wrong."""

from __future__ import annotations

import logging
import time

LOGGERS = ("asyncio", "chairlift.cluster", "chairlift.server", "python_multipart.multipart", "uvicorn.error")
MAX_LINES = 10  # of one statement of the program
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
