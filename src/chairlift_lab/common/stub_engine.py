"""What the front end is measured with: an engine process without a model, and readers of many streams at once.

Every step of the engine adds one token to every request, at a given rate; `python -m chairlift_lab.common.stub_engine
serve MODEL WORKERS RATE` starts a server with it and prints its address. The readers are processes of their own, which
count events at little cost per event.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import zmq

from chairlift.core.request import RequestLimits
from chairlift.errors import ChairliftError
from chairlift.server.config import ServerConfig
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import (
    Cancel,
    FromEngine,
    Heartbeat,
    Loaded,
    Shutdown,
    StepReport,
    Submit,
    Update,
    decode_to_engine,
    encode,
)

TEXT, TOKEN = " token", 5
HEARTBEAT_SECONDS = 0.5
LIMITS = RequestLimits(vocab_size=32_000, max_model_len=1_000_000)


class StubEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._tokens_per_s: float = settings["engine"]["tokens_per_s"]
        self._parent = settings["parent"]
        context = zmq.Context()
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for channel in (self._inbox, self._outbox):
            channel.setsockopt(zmq.SNDHWM, 0)
            channel.setsockopt(zmq.RCVHWM, 0)
        self._inbox.connect(settings["commands"])
        self._outbox.connect(settings["reports"])
        self._left: dict[str, int] = {}  # tokens to come, by request
        self._stopping = False

    def run(self) -> None:
        self._send(Loaded(LIMITS, max_batch_requests=100_000))
        due = beat = time.monotonic()
        while not self._stopping and os.getppid() == self._parent:
            now = time.monotonic()
            if now >= beat:
                self._send(Heartbeat(0.0))
                beat = now + HEARTBEAT_SECONDS
            if not self._left:
                due = now  # idle time earns no tokens
            self._receive(1000 * (min(due, beat) - now) if self._left else 100.0)
            now = time.monotonic()
            if self._left and now >= due:
                due = max(due + len(self._left) / self._tokens_per_s, now - 1.0)  # catches up with short delays
                self._step()

    def _receive(self, wait_ms: float) -> None:
        if not self._inbox.poll(max(0, math.floor(wait_ms))):
            return
        while self._inbox.poll(0):
            match decode_to_engine(self._inbox.recv()):
                case Submit() as request:
                    self._left[request.request_id] = request.params.max_tokens or 1
                case Cancel(request_ids):
                    for request_id in request_ids:
                        self._left.pop(request_id, None)
                case Shutdown():
                    self._stopping = True

    def _step(self) -> None:
        updates = []
        for request_id, left in list(self._left.items()):
            update = Update(request_id, text=TEXT, tokens=[TOKEN])
            if left == 1:
                update.finish_reason = "length"
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
            updates.append(update)
        count = len(updates)
        self._send(StepReport(updates, count, waiting=0, used_blocks=0, total_blocks=1, preemptions=0, requests=count))

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))


def stub_config(model: str, tokens_per_s: float, **options: Any) -> ServerConfig:
    """A server whose engine generates this number of tokens per second; `model` has the tokenizer."""
    return ServerConfig(
        model,
        ["stub"],
        engine={"tokens_per_s": tokens_per_s},
        port=0,
        limits=Limits(max_waiting=100_000),
        engine_module="chairlift_lab.common.stub_engine",
        quiet=True,
        **options,
    )


def _serve(model: str, workers: str, tokens_per_s: str) -> int:
    from chairlift.server.lifecycle import ServerEvents, serve_forever

    class Address(ServerEvents):
        def ready(self, address: str, loaded: Loaded) -> None:
            print(address, flush=True)

    config = stub_config(model, float(tokens_per_s), api_workers=int(workers))
    return asyncio.run(serve_forever(config, Address()))


# ---- reading many streams -------------------------------------------------------------------------------------------

EVENT = b"data: {"
END = b"data: [DONE]"


class _Stream(asyncio.Protocol):
    def __init__(self, body: bytes, key: str, done: asyncio.Future[None]) -> None:
        self.events = 0
        self.began = self.first = self.last = 0.0
        self.complete = False
        self._body = body
        self._key = key
        self.done = done
        self._end = b""  # The end of the last piece, since an event may arrive in two.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.began = time.monotonic()
        head = "POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"x-api-key: {self._key}\r\n" if self._key else ""
        transport.write(f"{head}content-length: {len(self._body)}\r\n\r\n".encode() + self._body)

    def data_received(self, data: bytes) -> None:
        self.last = time.monotonic()
        joined = self._end + data
        self.events += joined.count(EVENT) - self._end.count(EVENT)
        self.complete = self.complete or END in joined
        self._end = joined[-len(END) :]
        if not self.first and self.events:
            self.first = self.last

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def read_streams(url: str, count: int, tokens: int, key: str = "") -> dict[str, Any]:
    """Open all streams, read them to their ends, and return the totals and each time to the first event."""
    address = urlsplit(url)
    fields = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    loop = asyncio.get_running_loop()
    streams: list[_Stream] = []
    began = time.monotonic()
    for _ in range(count):
        make_stream = partial(_Stream, body, key, loop.create_future())
        _, stream = await loop.create_connection(make_stream, str(address.hostname), address.port or 80)
        streams.append(stream)
    await asyncio.gather(*(stream.done for stream in streams))
    return {
        "complete": sum(stream.complete for stream in streams),
        "events": sum(stream.events for stream in streams),
        "first_seconds": [stream.first - stream.began for stream in streams],
        "began": began,
        "last": max(stream.last for stream in streams),
    }


@dataclass(frozen=True, slots=True)
class StreamTotals:
    """What all streams of a run delivered."""

    events: int
    seconds: float  # Counted from the first request to the last byte.
    first_seconds: Sequence[float]  # Each stream's first event came after this.


def read_in_processes(endpoints: Sequence[tuple[str, str]], streams: int, tokens: int) -> StreamTotals:
    """Read streams in equal shares from the endpoints (address, API key), each in a process of its own."""
    shares = [streams // len(endpoints) + (index < streams % len(endpoints)) for index in range(len(endpoints))]
    jobs = [json.dumps([url, share, tokens, key]) for (url, key), share in zip(endpoints, shares, strict=True)]
    command = [sys.executable, "-m", "chairlift_lab.common.stub_engine", "read"]
    readers = [subprocess.Popen([*command, job], stdout=subprocess.PIPE, text=True) for job in jobs]
    totals = [json.loads(reader.communicate()[0]) for reader in readers]
    if sum(each["complete"] for each in totals) != streams:
        raise ChairliftError("some streams were not complete")
    seconds = max(each["last"] for each in totals) - min(each["began"] for each in totals)
    first = [each for total in totals for each in total["first_seconds"]]
    return StreamTotals(sum(each["events"] for each in totals), seconds, first)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *arguments]:
            sys.exit(_serve(*arguments))
        case ["read", job]:
            print(json.dumps(asyncio.run(read_streams(*json.loads(job)))))
        case ["-", _]:  # It is started as an engine.
            StubEngine(json.loads(sys.stdin.readline())).run()
