"""Ends the engine process together with the front end that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
