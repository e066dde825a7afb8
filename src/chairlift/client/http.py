"""An asynchronous HTTP client that reuses connections, directly on asyncio.

A load generator shares the machine with the measured server, so the cost of each received piece matters: here it is one
call of `data_received`."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from chairlift.client.response import BadResponse, ResponseReader
from chairlift.errors import InvalidParameter


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


__all__ = ["BadResponse", "HttpClient", "HttpResponse"]
