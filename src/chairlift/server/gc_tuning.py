"""Garbage collector settings for processes with many permanent objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection; call it once everything is loaded.

    Otherwise each full collection visits all modules, weights and tokenizers, and a large request could block all
    others for seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@contextmanager
def loaded_objects_frozen() -> Iterator[None]:
    """`freeze_loaded_objects` for the duration of a `with` block."""
    before = gc.get_threshold()
    freeze_loaded_objects()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
