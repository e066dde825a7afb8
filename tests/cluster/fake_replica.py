"""An HTTP server that answers as a test wants, and an ingress in front of such servers, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from chairlift.cluster.serving.ingress import make_ingress_app
from chairlift.cluster.serving.relay import Relay
from chairlift.cluster.serving.routing_table import ReplicaInfo, ReplicaLoad, RoutingTable
from chairlift.server.access import KeyTable
from chairlift.server.config import ServerConfig
from chairlift.server.http.listener import UvicornServer, listen
from chairlift.server.metrics import Metrics

KEY = "key-of-the-replica"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Received:
    head: str
    body: bytes

    def header(self, name: str) -> str | None:
        lines = (line.partition(": ") for line in self.head.splitlines()[1:])
        return next((value for found, _, value in lines if found.lower() == name), None)


@dataclass
class FakeReplica:
    answer: Answer
    requests: list[Received] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)  # whether a client closed its connection
    address: str = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received = Received(head, b"")
        received.body = await reader.readexactly(int(received.header("content-length") or 0))
        self.requests.append(received)
        leaving = asyncio.create_task(self._watch(reader))
        try:
            await self.answer(writer)
            await writer.drain()
        except ConnectionError:
            self.closed.set()
        finally:
            writer.close()
            leaving.cancel()

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        await reader.read()
        self.closed.set()


def whole(status: int, body: str = '{"ok": true}', **headers: str) -> Answer:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}{more}connection: close\r\n\r\n{body}".encode())

    return answer


async def die(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def stream(
    *events: str, ends: bool = True, then: Answer | None = None, media_type: str = "text/event-stream"
) -> Answer:
    """Send the events of a stream; without `ends` the connection breaks after them."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\ntransfer-encoding: chunked\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode())
        for event in events:
            writer.write(f"{len(event):x}\r\n{event}\r\n".encode())
        await writer.drain()
        if then is not None:
            await then(writer)
        if ends:
            writer.write(b"0\r\n\r\n")

    return answer


@contextmanager
def ingress(
    *replicas: FakeReplica, servers: Sequence[str] = (), config: ServerConfig | None = None, policy: str = "round-robin"
) -> Iterator[tuple[str, RoutingTable]]:
    """Run an ingress before these replicas and `servers`, which are addresses; yields its address and its table."""
    config = config or ServerConfig("tiny")
    table = RoutingTable(policy)
    started: Future[tuple[str, Callable[[], object]]] = Future()  # the address, and what ends the ingress

    async def no_replica() -> None:
        return None

    async def run() -> None:
        started_here = [await replica.start() for replica in replicas]
        table.update(
            (str(index), ReplicaInfo(address, KEY, 10_000, "1", 1, "node"), ReplicaLoad())
            for index, address in enumerate([*(replica.address for replica in replicas), *servers])
        )
        relay = Relay(table, no_replica, isolate_keys=config.isolate_keys)
        keys = KeyTable(config.keys.read())
        app = make_ingress_app(config, table, relay, Metrics("tiny"), keys)
        listener = listen("127.0.0.1", 0)
        server = UvicornServer(app, config.limits)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        stop = asyncio.Event()
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        started.set_result((f"http://127.0.0.1:{listener.getsockname()[1]}", end))
        await stop.wait()
        server.should_exit = True
        await serving
        await relay.close()
        for one in started_here:
            one.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    address, end = started.result(20)
    try:
        yield address, table
    finally:
        end()
        thread.join(20)
        assert not thread.is_alive()
