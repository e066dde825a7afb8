"""What a process of the server sets for itself: its garbage collection, and its end together with its parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 100)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import modules in a `with` block: they are almost all that is allocated, and full collections would visit them
    again and again, which takes as long as a sixth of the import of torch. Later collections leave them out."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        gc.enable()


def freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection; call it once everything is loaded.

    Otherwise each full collection visits all modules, weights and tokenizers, and a large request could block all
    others for seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


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


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits, even while it is loading or computing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    exit_if_orphaned(parent)  # it may have exited before


def exit_if_orphaned(parent: int) -> None:
    """Exit at once if the process `parent` has exited, without waiting for a step in flight."""
    if os.getppid() != parent:
        os._exit(1)
