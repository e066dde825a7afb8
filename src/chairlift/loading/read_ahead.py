"""Reading and computing at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

T = TypeVar("T")

_NOTHING = object()


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; the next one is prepared in a thread while the caller is busy with the one at hand."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="chairlift-read-ahead") as thread:
        upcoming = thread.submit(next, iterator, cast(T, _NOTHING))
        while (item := upcoming.result()) is not _NOTHING:
            upcoming = thread.submit(next, iterator, cast(T, _NOTHING))
            yield item
