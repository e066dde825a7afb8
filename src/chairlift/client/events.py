"""Server-sent events, as OpenAI-compatible servers send them: one line of data each."""

from __future__ import annotations


class EventLineParser:
    """Takes the bytes of a stream and gives out what follows `data:`, one event after the other."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
