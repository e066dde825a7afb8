"""Server-sent events of OpenAI-compatible servers, which have one line of data each."""

from __future__ import annotations


class EventLineParser:
    """Parses the bytes of a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
