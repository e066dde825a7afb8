"""Starts the workers and starts them again when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace

from chairlift.server.access import APIKey
from chairlift.server.config import ServerConfig, encode_config
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient
from chairlift.server.workers.hub import Hub, WorkerLink
from chairlift.server.workers.messages import (
    Channel,
    Configure,
    DrainWorker,
    ReloadCertificate,
    SetKeys,
    StopWorker,
    ToHub,
    ToWorker,
)

log = logging.getLogger("chairlift.server")

MAX_EARLY_DEATHS = 3  # So many workers in a row may die within EARLY_SECONDS.
EARLY_SECONDS = 10.0
STOP_SECONDS = 5.0  # A worker that has not exited by then is killed.


class WorkerPool:
    """The front end of a server with several HTTP processes. This process runs the hub and supervises the engine."""

    def __init__(self, config: ServerConfig, chat_template: str | None, engine: EngineClient, metrics: Metrics) -> None:
        self.engine = engine
        self._hub = Hub(self.engine, metrics, config.limits)
        self._config = config
        self._chat_template = chat_template
        self._keys = config.keys.read()
        self._stopping = asyncio.Event()
        self._early_deaths = 0
        self._all_listening = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Run the workers until `stop`, or until they die again and again."""
        await self.engine.start()
        running = asyncio.create_task(self._hub.run())
        try:
            await asyncio.gather(*(self._keep_running(listener) for _ in range(self._config.api_workers)))
        finally:
            running.cancel()

    async def wait_until_listening(self) -> None:
        await self._all_listening.wait()

    def replace_keys(self, keys: list[APIKey]) -> None:
        self._keys = keys
        self._send_all(SetKeys(keys))

    def reload_certificate(self) -> None:
        self._send_all(ReloadCertificate())

    def drain(self) -> None:
        self._stopping.set()
        self._hub.admission.draining = True
        self._send_all(DrainWorker())

    @property
    def is_idle(self) -> bool:
        """Whether all workers have exited, as they do once they are drained."""
        return not self._hub.links

    def stop(self) -> None:
        self._stopping.set()
        self._send_all(StopWorker())

    def _send_all(self, message: ToWorker) -> None:
        for link in self._hub.links:
            link.send(message)

    async def _keep_running(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._run_worker(listener)
            if self._stopping.is_set():
                return
            self._early_deaths = self._early_deaths + 1 if time.monotonic() - began < EARLY_SECONDS else 0
            if self._early_deaths > MAX_EARLY_DEATHS:
                log.error("an HTTP process exited with status %d; it is not started again", status)
                self.stop()
                return
            self._hub.metrics.worker_restarts.inc()
            log.error("an HTTP process exited with status %d; starting another", status)

    async def _run_worker(self, listener: socket.socket) -> int:
        """Run one worker until it exits; return its exit status."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), listener.fileno()]
            command = [sys.executable, "-m", "chairlift.server.workers.worker", *map(str, fds), str(os.getpid())]
            process = await asyncio.create_subprocess_exec(*command, pass_fds=fds)
        channel: Channel[ToHub, ToWorker] = await Channel.open(ours, ToHub)
        link = WorkerLink(self._hub, channel)
        link.send(Configure(encode_config(self._worker_config()), self._chat_template, self._keys))
        link.send_status()
        self._hub.links.add(link)
        if self._stopping.is_set():  # the order was sent before this worker was there
            link.send(StopWorker())
        watching = asyncio.create_task(self._watch(link, process))
        try:
            await link.serve()
        finally:
            watching.cancel()
            await self._hub.retire(link)
            channel.close()
            await _end(process)
        assert process.returncode is not None
        return process.returncode

    async def _watch(self, link: WorkerLink, process: asyncio.subprocess.Process) -> None:
        """Note when all workers listen, and kill a worker that does not answer any more."""
        await link.listening.wait()
        links = self._hub.links
        if len(links) == self._config.api_workers and all(one.listening.is_set() for one in links):
            self._all_listening.set()
        patience = self._config.supervision.heartbeat_timeout
        while True:
            now = time.monotonic()
            await asyncio.sleep(1.0)
            if time.monotonic() - now > 2.0:
                link.last_message = time.monotonic()  # this process was suspended, so messages may be queued
            elif time.monotonic() - link.last_message > patience:  # it sends its metrics every second
                log.error("an HTTP process has been silent for %g s: killing it", patience)
                process.kill()
                return

    def _worker_config(self) -> ServerConfig:
        """The configuration of one worker: limits on what a process holds are divided."""
        limits, count = self._config.limits, self._config.api_workers
        text_jobs = max(1, limits.max_text_jobs // count)
        connections = limits.max_connections and max(1, limits.max_connections // count)
        limits = replace(
            limits,
            max_text_jobs=text_jobs,
            max_held_bytes=limits.max_held_bytes // count,
            max_connections=connections,
        )
        return replace(self._config, limits=limits)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a worker whose channel has ended; kill it if it does not exit."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    if process.returncode is None:
        process.kill()
        await process.wait()
