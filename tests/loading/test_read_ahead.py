"""Items prepared in a thread arrive unchanged and in order, and so do failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from chairlift.loading.stored_weight import read_ahead


def test_the_same_items_in_order() -> None:
    assert list(read_ahead(iter(range(10)))) == list(range(10))
    assert list(read_ahead([])) == []


def test_exactly_one_item_is_prepared_ahead() -> None:
    made: list[int] = []
    ready = threading.Event()

    def items() -> Iterator[int]:
        for item in range(5):
            made.append(item)
            if item == 1:
                ready.set()
            yield item

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert ready.wait(10)
    assert made == [0, 1]


def test_a_failure_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    ahead = read_ahead(items())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="gone"):
        next(ahead)


def test_stopping_early_leaves_no_thread() -> None:
    ahead = read_ahead(iter(range(100)))
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("chairlift-read-ahead") for thread in threading.enumerate())
