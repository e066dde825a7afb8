"""An engine that runs in a thread of its own, for callers that must not block."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from chairlift.engine.engine import Engine
from chairlift.errors import EngineDead

T = TypeVar("T")

CLOSED = "the engine was closed"


class EngineThread:
    """Steps an engine while it has work, and makes calls on it between steps.

    Only this thread uses the engine: everything else goes through `call`.
    """

    def __init__(self, engine: Engine, on_end: Callable[[Exception], None]) -> None:
        """`on_end` is called in the thread when no more steps will be computed, with the reason."""
        self._engine = engine
        self._on_end = on_end
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._ended = False  # no more calls are accepted; guarded by the lock
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` in the thread, before its next step."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(EngineDead(CLOSED))
            else:
                self._calls.put(_Call(function, future))
        return future

    def stop(self) -> None:
        """End the thread after its step and wait for it; open requests get no more output."""
        self.call(_stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason: Exception = EngineDead(CLOSED)
        try:
            while True:
                self._turn()
        except _Stopped:
            pass
        except Exception as error:
            reason = error
        with self._lock:
            self._ended = True
        self._on_end(reason)
        while not self._calls.empty():
            self._calls.get().refuse()
        self._engine.shut_down()
        del self._engine, self._on_end  # Their memory is free once nothing else refers to them.

    def _turn(self) -> None:
        engine = self._engine
        self._make_calls(0.0 if engine.prepare() else engine.pause())
        if engine.has_work:
            engine.step()
            engine.check_alive()

    def _make_calls(self, pause: float) -> None:
        """Make all calls that have come; if there are none, wait up to `pause` seconds for one."""
        try:
            if pause > 0:
                self._calls.get(timeout=None if math.isinf(pause) else pause).make()
            while True:
                self._calls.get_nowait().make()
        except Empty:
            return


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    future: Future[Any]

    def make(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except _Stopped:
            self.future.set_result(None)
            raise
        except Exception as error:
            self.future.set_exception(error)

    def refuse(self) -> None:
        """End the call without making it; its caller may have cancelled it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineDead(CLOSED))


class _Stopped(Exception):
    """The thread is to end."""


def _stop() -> None:
    raise _Stopped
