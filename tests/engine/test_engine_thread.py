"""EngineThread: every call ends, also when the thread does."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chairlift.engine.engine import Engine
from chairlift.engine.engine_thread import EngineThread
from chairlift.errors import EngineDead


def test_calls_after_the_end_are_refused_beside_cancelled_ones() -> None:
    entered, proceed, shut_down = threading.Event(), threading.Event(), threading.Event()
    engine: Any = SimpleNamespace(
        prepare=lambda: False, pause=lambda: math.inf, has_work=False, shut_down=shut_down.set
    )
    thread = EngineThread(cast(Engine, engine), lambda reason: None)

    def hold() -> None:
        entered.set()
        proceed.wait(10)

    thread.call(hold)
    entered.wait(10)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    while thread._calls.empty():
        time.sleep(0.001)
    cancelled, refused = thread.call(lambda: 1), thread.call(lambda: 2)
    assert cancelled.cancel()
    proceed.set()
    with pytest.raises(EngineDead):
        refused.result(10)
    assert shut_down.wait(10)
    stopping.join(10)
    assert not stopping.is_alive()
