"""A worker: an HTTP process whose engine is the hub's.

The hub starts it as `python -m chairlift.server.workers.worker`, with the file descriptors of their channel and of the
listening socket. It exits when the hub tells it to, or when the hub has exited.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from contextlib import suppress

from chairlift.server.config import decode_config
from chairlift.server.front_end import HTTPServer, load_served_model
from chairlift.server.http.service import Service
from chairlift.server.process.this_process import die_with_parent
from chairlift.server.wire.messages import DashboardFrame, RecorderFault
from chairlift.server.workers.messages import (
    AskText,
    Channel,
    Configure,
    Displaced,
    DrainWorker,
    FindText,
    Listening,
    ReloadCertificate,
    Reply,
    Samples,
    SendSamples,
    SetKeys,
    SetWatching,
    StopWorker,
    TextFound,
    Totals,
    ToWorker,
)
from chairlift.server.workers.remote import (
    HubCalls,
    HubChannel,
    RemoteAdmission,
    RemoteEngine,
    RemoteRateLimits,
    WorkerMetrics,
)


class Worker:
    def __init__(self, channel: HubChannel, settings: Configure) -> None:
        config = decode_config(settings.config)
        self._channel = channel
        self._calls = HubCalls(channel)
        self._engine = RemoteEngine(channel)
        self._metrics = WorkerMetrics(self._calls)
        self._admission = RemoteAdmission(self._calls, self._engine, self._metrics, config.limits)
        service = Service(
            load_served_model(config, settings.chat_template),
            self._engine,
            self._metrics,
            config.limits,
            admission=self._admission,
            rate_limits=RemoteRateLimits(self._calls),
            isolate_keys=config.isolate_keys,
            policy_switch=config.may_switch_policy(),
        )
        service.subscribers.find_elsewhere = self._find_text
        self._http = HTTPServer(config, service, settings.keys, shared=True)

    async def run(self, listener: socket.socket) -> None:
        serving = asyncio.create_task(self._http.serve(listener))
        receiving = asyncio.create_task(self._receive())
        announcing = asyncio.create_task(self._announce())
        await asyncio.wait({serving, receiving}, return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        self._http.stop()
        await serving
        receiving.cancel()

    async def _find_text(self, request_id: str, key: bytes | None) -> dict[str, str | bool] | None:
        """Return the texts of a request of another worker."""
        found: dict[str, str | bool] | None
        _, found = await self._calls.call(lambda call: FindText(call, request_id, key))
        return found

    async def _announce(self) -> None:
        await self._http.wait_until_listening()
        self._channel.send(Listening())

    async def _receive(self) -> None:
        """Handle the hub's messages until it exits or stops this worker."""
        with suppress(EOFError):
            while not isinstance(message := await self._channel.receive(), StopWorker):
                self._handle(message)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Reply():
                self._calls.on_reply(message)
            case Displaced():
                self._admission.on_displaced(message)
            case DashboardFrame() | RecorderFault():
                self._engine.on_frame(message)
            case SetKeys(keys):
                self._http.replace_keys(keys)
            case ReloadCertificate():
                self._http.reload_certificate()
            case SetWatching(on):
                self._http.service.subscribers.set_watched_elsewhere(on)
            case AskText(number, request_id, key):
                text = self._http.service.subscribers.texts.find(request_id, key)
                self._channel.send(TextFound(number, text))
            case SendSamples():
                self._channel.send(Samples(self._metrics.samples()))
            case DrainWorker():
                self._http.drain()
                self._draining = asyncio.create_task(self._exit_when_idle())
            case Totals():
                self._metrics.totals = message.values
                self._engine.receive(message)
            case Configure() | StopWorker():
                raise AssertionError(message)
            case _:
                self._engine.receive(message)

    async def _exit_when_idle(self) -> None:
        while not self._http.is_idle:
            await asyncio.sleep(0.05)
        self._http.stop()


async def _run(channel_fd: int, listener_fd: int) -> None:
    channel: HubChannel = await Channel.open(socket.socket(fileno=channel_fd), ToWorker)
    settings = await channel.receive()
    assert isinstance(settings, Configure)
    logging.getLogger("chairlift").setLevel(decode_config(settings.config).log_level.upper())
    await Worker(channel, settings).run(socket.socket(fileno=listener_fd))


def main() -> None:
    channel, listener, hub = map(int, sys.argv[1:])
    die_with_parent(hub)
    # They reach the whole process group; the hub handles them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    asyncio.run(_run(channel, listener))


if __name__ == "__main__":
    main()
