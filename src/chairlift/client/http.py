"""An asynchronous HTTP client that reuses connections, directly on asyncio, with an incremental parser of responses.

A load generator shares the machine with the measured server, so the cost of each received piece matters: here it is one
call of `data_received`.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import urlsplit

from chairlift.errors import InvalidParameter

MAX_HEAD = 64 * 1024
MAX_CHUNK_LINE = 1024


class BadResponse(Exception):
    """The received data is not a valid HTTP response."""


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()  # a body of known length
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class ResponseReader:
    """Parses a response as its bytes arrive and passes the pieces of its body to `on_body`."""

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._on_body = on_body
        self._state = _State.HEAD
        self._buffer = b""
        self._left = 0  # remaining bytes of the body or chunk

    @property
    def begun(self) -> bool:
        return self.status != 0 or bool(self._buffer)

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return self.done and self.headers.get("connection", "").lower() != "close" and not self._buffer

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer and not self.done and self._advance():
            pass

    def close(self) -> bool:
        """Handle the end of the connection; return whether the response is complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
            self.headers["connection"] = "close"
        return self.done

    def _advance(self) -> bool:
        """Parse the next element; return False if more bytes are needed."""
        match self._state:
            case _State.HEAD:
                return self._read_head()
            case _State.LENGTH | _State.CHUNK:
                return self._read_known()
            case _State.UNTIL_CLOSE:
                self._on_body(self._take(len(self._buffer)))
                return True
            case _:
                return self._read_chunk_line()

    def _take(self, count: int) -> bytes:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _read_known(self) -> bool:
        piece = self._take(self._left)
        self._left -= len(piece)
        if not self._left:
            self._state = _State.DONE if self._state is _State.LENGTH else _State.CHUNK_END
        self._on_body(piece)
        return True

    def _read_chunk_line(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_CHUNK_LINE:
                raise BadResponse("a chunk without a size")
            return False
        line = self._take(end + 2)[:-2]
        if self._state is _State.CHUNK_SIZE:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise BadResponse("a chunk without a size") from None
            self._state = _State.CHUNK if self._left else _State.TRAILER
        elif self._state is _State.CHUNK_END:
            self._state = _State.CHUNK_SIZE
        elif not line:  # the trailer ends with an empty line
            self._state = _State.DONE
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadResponse("a head without an end")
            return False
        first, *lines = self._take(end + 4)[:-4].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise BadResponse("no HTTP/1.1")
        if 100 <= int(words[1]) < 200:
            return True  # an informational response; the final one follows
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        if words[0] == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        self._state = self._body_state()
        return True

    def _body_state(self) -> _State:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return _State.CHUNK_SIZE
        length = self.headers.get("content-length")
        if length is None:
            return _State.UNTIL_CLOSE
        if not length.isdigit():
            raise BadResponse("a length that is no number")
        self._left = int(length)
        return _State.LENGTH if self._left else _State.DONE


class EventLineParser:
    """Parses the bytes of a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed server URL. `root` is the path before /v1/…, usually empty."""

    host: str
    port: int
    tls: bool
    root: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL such as http://localhost:8000, with or without a scheme and a final /v1."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise InvalidParameter("url", f"has no valid port: {url!r}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidParameter("url", f"must look like http://localhost:8000, got {url!r}")
        if re.search(r"[\x00-\x20\x7f]", url):
            raise InvalidParameter("url", "must not have spaces or control characters in it")
        tls = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, root)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host_header}{self.root}"


def bearer(api_key: str) -> str:
    """An API key as the value of the Authorization header."""
    if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
        raise InvalidParameter("api_key", "must be printable ASCII")
    return f"Bearer {api_key}"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]


class HttpClient:
    """Sends any number of concurrent requests to one server, each on its own connection."""

    def __init__(self, address: Address, *, api_key: str | None = None) -> None:
        self.address = address
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []
        key = f"Authorization: {bearer(api_key)}\r\n" if api_key else ""
        host = f"Host: {address.host_header}\r\nUser-Agent: chairlift\r\n"
        self._shared_head = f"{host}Content-Type: application/json\r\n{key}"

    async def post(self, path: str, body: bytes, on_body: Callable[[bytes], None]) -> HttpResponse:
        """Send JSON and pass the body of the response to `on_body` as it arrives."""
        head = f"POST {self.address.root}{path} HTTP/1.1\r\n{self._shared_head}Content-Length: {len(body)}\r\n\r\n"
        message = head.encode() + body
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._use(connection, message, on_body)
            except _Stale:
                continue  # closed while idle: the server never read the request
        return await self._use(await self._connect(), message, on_body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = self.address.host, self.address.port
        _, connection = await loop.create_connection(_Connection, host, port, ssl=self._tls)
        return connection

    async def _use(self, connection: _Connection, message: bytes, on_body: Callable[[bytes], None]) -> HttpResponse:
        try:
            reader = await connection.exchange(message, on_body)
        except BaseException:
            connection.close()  # The server stops then, also on cancellation.
            raise
        if reader.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return HttpResponse(reader.status, reader.headers)


class _Stale(ConnectionError):
    """A reused connection was closed by the server."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._complete: asyncio.Future[None] | None = None
        self._lost = False
        self._uses = 0

    async def exchange(self, message: bytes, on_body: Callable[[bytes], None]) -> ResponseReader:
        if self._lost:
            raise _Stale
        assert self._transport is not None
        self._uses += 1
        self._reader = reader = ResponseReader(on_body)
        self._complete = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._complete
        return reader

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reader is None or self._complete is None or self._complete.done():
            self.close()  # no request is in flight
            return
        try:
            self._reader.feed(data)
        except Exception as error:  # The reader or `on_body` raises it.
            self._complete.set_exception(error)
            return
        if self._reader.done:
            self._complete.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self._reader is None or self._complete is None or self._complete.done():
            return
        if self._reader.close():
            self._complete.set_result(None)
        elif self._uses > 1 and not self._reader.begun:
            self._complete.set_exception(_Stale())
        else:
            self._complete.set_exception(error or ConnectionError("the server closed the connection"))
