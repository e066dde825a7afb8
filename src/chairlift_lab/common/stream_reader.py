"""Reads many streams at once, in processes of their own, and counts their events at little cost per event."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from chairlift.errors import ChairliftError

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
    command = [sys.executable, "-m", "chairlift_lab.common.stream_reader"]
    readers = [subprocess.Popen([*command, job], stdout=subprocess.PIPE, text=True) for job in jobs]
    totals = [json.loads(reader.communicate()[0]) for reader in readers]
    if sum(each["complete"] for each in totals) != streams:
        raise ChairliftError("some streams were not complete")
    seconds = max(each["last"] for each in totals) - min(each["began"] for each in totals)
    first = [each for total in totals for each in total["first_seconds"]]
    return StreamTotals(sum(each["events"] for each in totals), seconds, first)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(read_streams(*json.loads(sys.argv[1])))))
