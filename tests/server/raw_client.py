"""Clients on bare sockets, which can stop reading, disconnect or read a byte at a time."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """The received part of a response."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str | None] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    complete: bool = False  # whether the stream ended with [DONE]

    @property
    def text(self) -> str:
        return self.texts.get(0, "")


class RawClient:
    """A client with HTTP/1.0, so that the server closes the connection after the response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, url: str, body: dict[str, Any], *, buffer: int | None = None) -> RawClient:
        """`buffer` is the size of the receive buffer in bytes."""
        where = urlsplit(url)
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (where.hostname, where.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**16 if buffer is None else 64)
        data = json.dumps(body).encode()
        head = f"POST {where.path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return cls(reader, writer)

    async def answer(self) -> Answer:
        """The whole response."""
        answer = Answer(status=int((await self.reader.readline()).split()[1]))
        while await self.reader.readline() != b"\r\n":
            pass
        while line := await self.reader.readline():
            if line == b"data: [DONE]\n":
                answer.complete = True
            elif line.startswith((b"data: ", b"{")):
                _add_chunk(answer, json.loads(line.removeprefix(b"data: ")))
        self.close()
        return answer

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Reset the connection."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


def _add_chunk(answer: Answer, body: dict[str, Any]) -> None:
    answer.error = body.get("error", answer.error)
    for choice in body.get("choices", ()):
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        answer.reasons[index] = choice["finish_reason"] or answer.reasons.get(index)


async def post(url: str, body: dict[str, Any]) -> Answer:
    client = await RawClient.post(url, body)
    async with asyncio.timeout(240):
        return await client.answer()
