"""What a process of the server does for itself: its garbage collection, its end together with its parent, and the start
of the engine's process before its settings are known, so that it imports torch while the options are read."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

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


ENGINE_MODULE = "chairlift.server.process.engine_process"
FROM_INPUT = "-"  # Stands for the settings, which are a line of the process's standard input.


@dataclass(frozen=True, slots=True)
class WaitingProcess:
    """An engine process that waits for its settings."""

    process: subprocess.Popen[bytes]
    begun: float  # when it was started, by `time.monotonic`

    @classmethod
    def start(cls, module: str = ENGINE_MODULE) -> WaitingProcess:
        begun = time.monotonic()
        command = [sys.executable, "-m", module, FROM_INPUT, str(os.getpid())]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE), begun)

    def send(self, settings: Mapping[str, Any]) -> None:
        """Send the settings; a process that has ended is noticed by its exit status."""
        assert self.process.stdin is not None
        with suppress(OSError), self.process.stdin as pipe:
            pipe.write(json.dumps({**settings, "begun": self.begun}).encode() + b"\n")


_waiting: list[WaitingProcess] = []


@contextmanager
def engine_process_ahead() -> Iterator[None]:
    """Start an engine process; if no engine has taken it until the end of the block, it is killed.

    SIGTERM ends the block, as it later ends a server that is loading.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with suppress(OSError):  # no memory or file descriptors: it is started when it is needed
        _waiting.append(WaitingProcess.start())
    try:
        yield
    finally:
        early = take_early_process()
        if early is not None:
            early.process.kill()
            early.process.communicate()
        signal.signal(signal.SIGTERM, before)


def take_early_process() -> WaitingProcess | None:
    """The process that was started ahead, once."""
    return _waiting.pop() if _waiting else None
