"""A stub of the package torch."""

from __future__ import annotations

from stub_log import log

float32 = "float32"


def set_num_threads(count: int) -> None:
    log(threads=count)
