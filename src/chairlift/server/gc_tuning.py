"""Python's garbage collector, told what is here to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_loaded_objects() -> None:
    """Call it when all is loaded. The collector goes through every object that may be part of a cycle, again and again;
    with modules, weights and tokenizers among them, a large request could make it hold up all others for seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@contextmanager
def loaded_objects_frozen() -> Iterator[None]:
    """The same for a while."""
    before = gc.get_threshold()
    freeze_loaded_objects()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
