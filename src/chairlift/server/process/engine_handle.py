"""The engine process as seen by the front end, and its start."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from chairlift.server.process.socket_folder import make_socket_folder

ENGINE_MODULE = "chairlift.server.process.engine_process"


@dataclass(slots=True)
class EngineHandle:
    """One engine process with its own sockets, so that no message reaches its successor."""

    process: asyncio.subprocess.Process
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
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, json.dumps(settings))
        return EngineHandle(process, commands, reports, opened.pop_all().close)
