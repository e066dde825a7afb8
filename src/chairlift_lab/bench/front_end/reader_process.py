"""Reads many streams at once and counts their events, at little cost per event."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any
from urllib.parse import urlsplit

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
        self._end = b""  # of the last piece, since an event may arrive in two

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


if __name__ == "__main__":
    print(json.dumps(asyncio.run(read_streams(*json.loads(sys.argv[1])))))
