"""The engine process as seen by the front end, and its start."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq
import zmq.asyncio

from chairlift.server.process.early_start import ENGINE_MODULE, EarlyProcess, take_early_process
from chairlift.server.process.socket_folder import make_socket_folder


class ChildProcess(Protocol):
    """What is used of `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class AdoptedProcess:
    """A process that was started before the event loop."""

    def __init__(self, early: EarlyProcess) -> None:
        self._process = early.process
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited.set)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._exited.is_set() else None

    async def wait(self) -> int:
        await self._exited.wait()
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()


@dataclass(slots=True)
class EngineHandle:
    """One engine process with its own sockets, so that no message reaches its successor."""

    process: ChildProcess
    commands: zmq.asyncio.Socket
    reports: zmq.asyncio.Socket
    close: Callable[[], None]  # closes the sockets and removes their folder
    last_message: float = field(default_factory=time.monotonic)
    turn_seconds: float = 0.0  # as of the last heartbeat
    ready_at: float | None = None


async def spawn(
    context: zmq.asyncio.Context, model: str, options: dict[str, Any], *, log_level: str, module: str = ENGINE_MODULE
) -> EngineHandle:
    with ExitStack() as opened:  # closed again if the process cannot be started or the task is cancelled
        folder = make_socket_folder(opened)
        commands, reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, name in ((commands, "commands"), (reports, "reports")):
            opened.callback(socket.close, linger=0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{folder / name}")
        settings = {
            "model": model,
            "engine": options,
            "log_level": log_level,
            "parent": os.getpid(),
            "commands": f"ipc://{folder / 'commands'}",
            "reports": f"ipc://{folder / 'reports'}",
        }
        process = await _start(module, settings)
        return EngineHandle(process, commands, reports, opened.pop_all().close)


async def _start(module: str, settings: dict[str, Any]) -> ChildProcess:
    """Start the process, or send the settings to one that was started ahead."""
    early = take_early_process() if module == ENGINE_MODULE else None
    if early is not None and early.process.poll() is None:
        early.send(settings | {"begun": early.begun})
        return AdoptedProcess(early)
    text = json.dumps(settings | {"begun": time.monotonic()})
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, text)
