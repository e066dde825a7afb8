"""Client of the engine process, which it starts, supervises and restarts."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from chairlift.config import parse_adapters
from chairlift.errors import ChairliftError, EngineDead, EngineDied, InvalidParameter, TemporaryFailure
from chairlift.server.process.streams import OpenRequests, UpdateObserver, UpdateStream
from chairlift.server.process.this_process import ENGINE_MODULE, WaitingProcess, take_early_process
from chairlift.server.wire.errors import unavailable
from chairlift.server.wire.messages import (
    AdapterChanged,
    Cancel,
    DashboardFrame,
    EngineCommand,
    FailedToLoad,
    Heartbeat,
    Loaded,
    Loading,
    RecorderFault,
    Refused,
    Shutdown,
    StepReport,
    Submit,
    decode_from_engine,
    encode,
)

log = logging.getLogger("chairlift.server")

DIED = "the engine stopped unexpectedly; the request was not finished"


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # permanently: the engine cannot load or died too often
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Supervision:
    """Timeouts of the engine process, and limits on restarts."""

    heartbeat_timeout: float = 10.0  # seconds without a message after which it is killed
    loading_silence: float = 300.0  # heartbeat timeout while it loads, since imports and weights can block heartbeats
    step_timeout: float = 300.0  # seconds per step; a large prefill on a slow CPU is slow
    max_restarts: int = 5  # Those with less than `healthy_after` seconds of operation in between count.
    first_backoff: float = 0.25  # seconds, doubled at every restart
    healthy_after: float = 60.0


class EngineClient:
    def __init__(
        self,
        model: str,
        engine_options: dict[str, Any],
        on_report: Callable[[StepReport], None],
        on_restart: Callable[[], None],
        supervision: Supervision | None = None,
        *,
        log_level: str = "info",
        module: str = ENGINE_MODULE,
    ) -> None:
        self.state = EngineState.STARTING
        self.loaded: Loaded | None = None
        self.problem = ""  # reason of the failure, for the log
        self.bad_parameter: str | None = None  # the engine option that is the reason
        self.restarts = 0
        self.on_state: Callable[[], None] = lambda: None
        self.on_loading: Callable[[Loading], None] = lambda stage: None
        self.on_loaded: Callable[[Loaded], None] = lambda loaded: None
        self.on_frame: Callable[[DashboardFrame | RecorderFault], None] = lambda frame: None
        self.on_adapter: Callable[[AdapterChanged], None] = lambda answer: None
        self._model = model
        self._options = engine_options
        self._log_level = log_level
        self._module = module
        self._on_report = on_report
        self._on_restart = on_restart
        self._supervision = supervision or Supervision()
        self._context = zmq.asyncio.Context()
        self.requests = OpenRequests()
        self._handle: EngineHandle | None = None
        self._state_changed = asyncio.Event()
        self._spawned = asyncio.Event()  # whether a process was started
        self._supervisor: asyncio.Task[None] | None = None
        self._exit_status: int | None = None  # The last process's.

    @property
    def num_open(self) -> int:
        """Number of submitted sequences that are not finished."""
        return self.requests.num_sequences

    async def start(self) -> None:
        """Start the process, unless that was done before, and return when it runs."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())
        spawned = asyncio.create_task(self._spawned.wait())
        await asyncio.wait([self._supervisor, spawned], return_when=asyncio.FIRST_COMPLETED)
        spawned.cancel()

    async def wait_until_settled(self) -> EngineState:
        """Wait until the engine is ready, failed or stopped."""
        while self.state in (EngineState.STARTING, EngineState.RESTARTING):
            self._state_changed.clear()
            await self._state_changed.wait()
        return self.state

    def submit(
        self,
        requests: Sequence[Submit],
        observer: UpdateObserver | None = None,
        make_stream: Callable[..., UpdateStream] = UpdateStream,
    ) -> UpdateStream:
        """Submit all prompts of one HTTP request and return the stream of their updates."""
        if self.state is not EngineState.READY:
            raise EngineDead(f"the engine is {self.state.value}")
        messages = [encode(request) for request in requests]  # encode all before sending any: encoding may fail
        stream = self.requests.open(requests, observer, make_stream)
        for message in messages:
            self._send(message)
        return stream

    def send(self, command: EngineCommand) -> bool:
        """Send a message that is not about a request; return False if the engine is not ready."""
        ready = self._handle is not None and self.state is EngineState.READY
        if ready:
            self._send(encode(command))
        return ready

    def keep_adapter(self, name: str, path: str | None) -> None:
        """Let an engine that is started again have this adapter, or have it no more."""
        adapters = parse_adapters(self._options.get("lora") or {})
        adapters.pop(name, None)
        self._options = self._options | {"lora": adapters | ({} if path is None else {name: path})}

    def cancel(self, stream: UpdateStream) -> None:
        """Cancel the open completions of a stream. Never waits, so that a cancelled task can call it."""
        self._end(stream, "cancelled")

    def displace(self, stream: UpdateStream, error: Callable[[], Exception]) -> None:
        """Cancel a stream in favour of another request; its reader gets the error."""
        self._end(stream, "displaced", error())

    def _end(self, stream: UpdateStream, reason: str, error: Exception | None = None) -> None:
        ids = stream.end(reason, error)
        self.requests.remove(stream)
        if ids and self._handle is not None and self.state is EngineState.READY:
            self._send(encode(Cancel(ids)))

    def ping_streams(self) -> None:
        for stream in self.requests.streams():
            stream.ping()

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop the engine process, by force after `timeout` seconds, and wait for its exit."""
        ready = self.state is EngineState.READY  # it receives no messages while loading
        self._set_state(EngineState.STOPPED)
        self._fail_all(unavailable("the server is shutting down"))
        if self._handle is not None and ready:
            self._send(encode(Shutdown()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._handle.exited.wait(), timeout)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self._context.destroy(linger=0)

    def _send(self, message: bytes) -> None:
        """Send without waiting, since a dead process must not block the caller."""
        assert self._handle is not None
        self._handle.commands.send(message)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._state_changed.set()
        self.on_state()

    # ---- supervision ---------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while self.state is not EngineState.STOPPED:
            healthy = False
            try:
                healthy = await self._run_process()
            except (OSError, zmq.ZMQError) as error:  # no file descriptors or memory: a retry may succeed
                log.error("the engine cannot be started: %s", error)
            finally:
                if self.state is EngineState.READY:
                    self.requests.record_death()
                self._fail_all(EngineDied(DIED))
            if self.state in (EngineState.STOPPED, EngineState.FAILED):
                return
            if self.loaded is None and self._exit_status is not None:  # it would die again
                self.problem = _loading_problem(self._exit_status)
                self._set_state(EngineState.FAILED)
                return
            if healthy:
                self.restarts = 0
            self.restarts += 1
            if self.restarts > self._supervision.max_restarts:
                self.problem = f"it died {self.restarts} times in a row. {self.problem}".rstrip()
                log.error("the engine is not started again: %s", self.problem)
                self._set_state(EngineState.FAILED)
                return
            self._set_state(EngineState.RESTARTING)
            pause = self._supervision.first_backoff * 2 ** (self.restarts - 1)
            log.warning("the engine died; starting it again in %.2f s (restart %d)", pause, self.restarts)
            await asyncio.sleep(pause)
            self._on_restart()

    async def _run_process(self) -> bool:
        """Start the process and receive its messages until it exits or hangs. Returns whether it was healthy."""
        handle = self._handle = spawn(
            self._context, self._model, self._options, log_level=self._log_level, module=self._module
        )
        self._spawned.set()
        receiver = asyncio.create_task(self._receive(handle))
        exited = asyncio.create_task(handle.exited.wait())
        try:
            while not exited.done():
                await self._wait_for_change(handle, {exited, receiver})
                problem = "cannot be understood" if receiver.done() else self._fault(handle)
                if problem:
                    log.error("the engine %s: killing it", problem)
                    handle.process.kill()
                    await exited
            await asyncio.wait([receiver], timeout=0.2)  # messages sent before the exit may be in flight
            self._exit_status = handle.process.returncode
            return handle.ready_at is not None and time.monotonic() - handle.ready_at > self._supervision.healthy_after
        finally:
            receiver.cancel()
            if handle.process.returncode is None:
                handle.process.kill()
                await handle.exited.wait()
            self._handle = None
            handle.close()

    async def _wait_for_change(self, handle: EngineHandle, tasks: set[asyncio.Task[Any]]) -> None:
        tick, now = min(1.0, self._supervision.heartbeat_timeout / 4), time.monotonic()
        await asyncio.wait(tasks, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
        if time.monotonic() - now > 2 * tick:
            handle.last_message = time.monotonic()  # this process was suspended, so heartbeats may be queued

    def _fault(self, handle: EngineHandle) -> str | None:
        supervision = self._supervision
        patience = supervision.loading_silence if handle.ready_at is None else supervision.heartbeat_timeout
        if time.monotonic() - handle.last_message > patience:
            return f"has been silent for {patience:g} s"
        if handle.turn_seconds > supervision.step_timeout:
            return f"has been in one step for more than {supervision.step_timeout:g} s"
        return None

    async def _receive(self, handle: EngineHandle) -> None:
        while True:
            message = decode_from_engine(await handle.reports.recv())
            handle.last_message = time.monotonic()
            match message:
                case StepReport():
                    self._on_report(message)
                    self.requests.begin_step()
                    for update in message.updates:
                        self.requests.deliver(update)
                case Loading():
                    self.on_loading(message)
                case Loaded():
                    self.loaded, handle.ready_at = message, time.monotonic()
                    self.on_loaded(message)
                    if self.state is not EngineState.STOPPED:
                        self._set_state(EngineState.READY)
                case FailedToLoad():
                    self.problem, self.bad_parameter = message.problem, message.parameter
                    if self.loaded is None:  # if the model was loaded before, retry
                        self._set_state(EngineState.FAILED)
                case Refused():
                    error: ChairliftError = TemporaryFailure(message.problem)
                    if message.parameter is not None:
                        error = InvalidParameter(message.parameter, message.problem)
                    if (stream := self.requests.get(message.request_id)) is not None:
                        self._end(stream, "refused", error)  # The other prompts of the HTTP request end too.
                case AdapterChanged():
                    self.on_adapter(message)
                case DashboardFrame() | RecorderFault():
                    self.on_frame(message)
                case Heartbeat():
                    handle.turn_seconds = message.turn_seconds

    def _fail_all(self, error: Exception) -> None:
        for stream in self.requests.remove_all():
            stream.end("error", error)


def _loading_problem(status: int) -> str:
    """Describe the end of a process that died while loading, without a message."""
    if status == -signal.SIGKILL:
        return "it was killed while it loaded the model, probably because the machine ran out of memory"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name} while it loaded the model"
    return f"it exited with status {status} while it loaded the model"


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

    def send(self, command: EngineCommand) -> bool: ...

    def ping_streams(self) -> None: ...


# ---- the process and its sockets -------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineHandle:
    """One engine process with its own sockets, so that no message reaches its successor."""

    process: subprocess.Popen[bytes]
    commands: zmq.asyncio.Socket
    reports: zmq.asyncio.Socket
    close: Callable[[], None]  # closes the sockets and removes their folder
    last_message: float = field(default_factory=time.monotonic)
    turn_seconds: float = 0.0  # The last heartbeat said so.
    ready_at: float | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._watch, args=[asyncio.get_running_loop()], daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self.process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.exited.set)


def spawn(
    context: zmq.asyncio.Context, model: str, options: dict[str, Any], *, log_level: str, module: str = ENGINE_MODULE
) -> EngineHandle:
    """Start a process, or take one that was started ahead, and send it its settings."""
    with ExitStack() as opened:  # closed again if the process cannot be started
        folder = make_socket_folder(opened)
        commands, reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, name in ((commands, "commands"), (reports, "reports")):
            opened.callback(socket.close, linger=0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{folder / name}")
        waiting = take_early_process() if module == ENGINE_MODULE else None
        if waiting is None or waiting.process.poll() is not None:
            waiting = WaitingProcess.start(module)
        settings = {
            "model": model,
            "engine": options,
            "log_level": log_level,
            "parent": os.getpid(),
            "commands": f"ipc://{folder / 'commands'}",
            "reports": f"ipc://{folder / 'reports'}",
        }
        waiting.send(settings)
        return EngineHandle(waiting.process, commands, reports, opened.pop_all().close)


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
