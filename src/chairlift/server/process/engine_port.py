"""What the front end needs of an engine, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from chairlift.server.process.engine_client import EngineState
from chairlift.server.process.messages import DashboardFrame, Loaded, RecorderFault, RecordSteps, Submit, SwitchPolicy
from chairlift.server.process.stream import UpdateObserver, UpdateStream


class EnginePort(Protocol):
    """An engine to which requests are submitted: a process of its own, or the hub of several front ends."""

    state: EngineState
    loaded: Loaded | None
    on_frame: Callable[[DashboardFrame | RecorderFault], None]

    @property
    def num_open(self) -> int: ...

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[Submit], observer: UpdateObserver | None = None) -> UpdateStream: ...

    def cancel(self, stream: UpdateStream) -> None: ...

    def send(self, message: RecordSteps | SwitchPolicy) -> bool: ...

    def ping_streams(self) -> None: ...
