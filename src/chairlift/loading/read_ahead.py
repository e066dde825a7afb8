"""Reads the next item in a thread while the current one is processed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

T = TypeVar("T")

_NOTHING = object()


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, each prepared in a thread while the caller processes the one before."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="chairlift-read-ahead") as thread:
        upcoming = thread.submit(next, iterator, cast(T, _NOTHING))
        while (item := upcoming.result()) is not _NOTHING:
            upcoming = thread.submit(next, iterator, cast(T, _NOTHING))
            yield item
