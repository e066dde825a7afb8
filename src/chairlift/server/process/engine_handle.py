"""The engine process as seen by the front end: its start and the folder of its sockets."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from chairlift.server.process.this_process import ENGINE_MODULE, EarlyProcess, take_early_process


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

    process: asyncio.subprocess.Process | AdoptedProcess
    commands: zmq.asyncio.Socket
    reports: zmq.asyncio.Socket
    close: Callable[[], None]  # closes the sockets and removes their folder
    last_message: float = field(default_factory=time.monotonic)
    turn_seconds: float = 0.0  # The last heartbeat said so.
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


async def _start(module: str, settings: dict[str, Any]) -> asyncio.subprocess.Process | AdoptedProcess:
    """Start the process, or send the settings to one that was started ahead."""
    early = take_early_process() if module == ENGINE_MODULE else None
    if early is not None and early.process.poll() is None:
        early.send(settings | {"begun": early.begun})
        return AdoptedProcess(early)
    text = json.dumps(settings | {"begun": time.monotonic()})
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, text)


SOCKET_NAMES = frozenset({"commands", "reports"})
_PREFIX = "chairlift-"
_NEW_SECONDS = 60.0  # a younger folder may be about to be locked


def make_socket_folder(opened: ExitStack) -> Path:
    """Create a folder that only this user may enter. It stays locked until `opened` is closed, which removes it."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    opened.callback(shutil.rmtree, folder, ignore_errors=True)
    lock = os.open(folder, os.O_RDONLY)
    opened.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder


def remove_stale_folders() -> None:
    """Remove the folders of front ends that were killed: the kernel has released their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # It is another user's, or was just removed.
            _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _NEW_SECONDS:
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if {path.name for path in folder.iterdir()} <= SOCKET_NAMES:
            shutil.rmtree(folder)
    finally:
        os.close(lock)
