"""The ASGI application of the ingress: sends each request to a replica and relays the response.

The request's body is read whole, because the router needs it and a second attempt may too. The response is relayed as
it arrives: a client that reads slowly stops the reading from the replica, and a client that leaves closes the
connection to it, which cancels the request there.

What a request used is read from the replica's own reports, not from responses, which repeat what clients write.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from chairlift.cluster.routing.router import Route, RoutedRequest
from chairlift.cluster.serving.routed_body import body_identity, error_events, generates, is_whole, read_body
from chairlift.cluster.serving.routing_table import KnownReplica, NoReplica, RoutingTable
from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey
from chairlift.server.generation.usage import (
    REPORT_HEADER,
    REPORTS_PATH,
    STREAM_ENDS,
    USAGE_HEADER,
    UsageReport,
    read_header,
    take_comments,
)
from chairlift.server.http.guards import CLIENT_CLASS_HEADER, CLIENT_KEY_HEADER, CLIENT_NAME_HEADER, client_headers
from chairlift.server.process.streams import Quarantine
from chairlift.server.wire.errors import APIError, as_api_error, unavailable

log = logging.getLogger("chairlift.cluster")

METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH")  # Others have no route in a server; HEAD is a GET by now.
ATTEMPTS = 2
LARGE_BODY = 200_000  # bytes; parsing more than a millisecond would delay all streams
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 30.0  # less than the servers': they must not close a connection that is about to be used
PROBE_SECONDS, MAX_PROBES = 5, 4  # Idle connections are probed: a replica's machine may vanish without closing them.
TAIL_BYTES = 2048  # The end of a stream is kept, which has the number of its last event.
REPORT_SECONDS = 2.0  # The time for the report on a request whose client left.
SUSPECT_SECONDS = 30.0  # A request that may have killed an engine waits so long for the others.
# Of one connection only, or set anew here.
_OWN_HEADERS = frozenset(
    (
        b"host connection keep-alive transfer-encoding te trailer upgrade proxy-connection proxy-authorization expect "
        b"content-length accept-encoding authorization x-api-key x-request-id"
    ).split()
) | {CLIENT_NAME_HEADER, CLIENT_KEY_HEADER, CLIENT_CLASS_HEADER, REPORT_HEADER}
_OWN_RESPONSE_HEADERS = frozenset(b"connection keep-alive transfer-encoding x-request-id date".split()) | {USAGE_HEADER}
Connect = Callable[[], Awaitable[None]]


class _Failed(Exception):
    """A replica did not answer; nothing of a response was relayed."""


@dataclass(slots=True)
class _Request:
    method: str
    path: str  # decoded; routes and error events depend on it
    raw_path: str  # The path as the client wrote it.
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    key: APIKey | None
    routed: RoutedRequest
    generates: bool

    def identity(self) -> bytes:
        """What equal requests have in common, whichever client sends them."""
        return body_identity(self.path, self.body)


class Relay:
    """Sends requests to the replicas of `table`; `wait_for_replica` returns once there may be one."""

    def __init__(self, table: RoutingTable, wait_for_replica: Connect, *, isolate_keys: bool = False) -> None:
        self._table = table
        self._wait_for_replica = wait_for_replica
        self._isolate_keys = isolate_keys
        self._quarantine = Quarantine()
        self._suspects = asyncio.Lock()  # held by the one request that may have killed an engine and is sent again
        self._in_flight: defaultdict[str, set[_Exchange]] = defaultdict(set)  # The keys are replicas.
        self._session: aiohttp.ClientSession | None = None
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_open += 1
        try:
            await self._handle(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in METHODS:  # The HTTP client would write "post" as "POST", which the limits count.
            raise APIError(405, "Method Not Allowed", code="method_not_allowed")
        request = await self._read(scope, receive)
        if (allowance := scope["state"].get("allowance")) is not None:
            await allowance.charge(request.routed.num_prompt + (request.routed.max_output or 0))
        exchanges: list[_Exchange] = []
        answer = asyncio.create_task(self._answer(request, send, exchanges))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            gone.cancel()
            left = answer.cancel()  # It is true if there was no whole response yet.
            await asyncio.wait({answer})
            if exchanges:
                scope["state"]["usage"] = await self._usage(exchanges[-1], left=left)  # The limits of the key count it.

    async def _usage(self, exchange: _Exchange, *, left: bool) -> UsageReport | None:
        """What a request used; `left`: whether its client did not wait for the end."""
        if left:  # Its last report has nothing of the tokens that the client did not read.
            exchange.report = await exchange.ask_for_report(self._connections()) or exchange.report
        return exchange.report or exchange.estimate()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _read(self, scope: Scope, receive: Receive) -> _Request:
        pieces = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise APIError(499, "the client closed the connection", type_="client_closed")
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        body, path, key = b"".join(pieces), scope["path"], scope["state"].get("api_key")
        is_generation = scope["method"] == "POST" and generates(path)
        salt = key.digest.hex() if self._isolate_keys and key is not None else ""
        parse = partial(read_body, path, body, with_keys=self._table.reads_prefixes and is_generation, salt=salt)
        routed = parse() if len(body) < LARGE_BODY else await asyncio.to_thread(parse)
        return _Request(
            method=scope["method"],
            path=path,
            raw_path=scope["raw_path"].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=_request_headers(scope),
            body=body,
            key=key,
            routed=routed if is_generation else routed._replace(max_output=0),
            generates=is_generation,
        )

    async def _answer(self, request: _Request, send: Send, exchanges: list[_Exchange]) -> None:
        """Relay the response of a replica; `exchanges` are the attempts."""
        self._check(request)
        avoided: set[str] = set()
        for attempt in range(ATTEMPTS):
            replica, route = await self._choose(request.routed, avoided)
            exchange = _Exchange(self._table, replica, route, request, send)
            is_suspect = any(one.engine_died for one in exchanges)
            exchanges.append(exchange)
            others = self._in_flight[replica.id]
            others.add(exchange)
            try:
                async with self._turn() if is_suspect else nullcontext():
                    await exchange.begin(self._connections(), may_retry=attempt + 1 < ATTEMPTS)
                await exchange.relay()
                return
            except _Failed as error:
                log.warning("the replica %s does not answer (%s)", replica.id, error)
                self._table.failed(replica.id)
                avoided.add(replica.id)
            finally:
                exchange.end()
                self._judge(exchange, others)
                others.discard(exchange)
                if not others:
                    self._in_flight.pop(replica.id, None)
            if exchange.engine_died and not exchange.had_company:
                break  # it has killed the engine, and must not be sent to another one
        raise unavailable("the request could not be answered just now; try again shortly")

    def _check(self, request: _Request) -> None:
        """Refuse a request that was in flight when engines of this fleet died."""
        try:
            if self._quarantine:
                self._quarantine.check(request.identity())
        except InvalidParameter as error:
            raise as_api_error(error) from None

    def _judge(self, exchange: _Exchange, others: set[_Exchange]) -> None:
        """Remember whether the engine died; the other requests of the replica may be the reason too."""
        if exchange.engine_died:
            self._quarantine.record_death([exchange.request.identity()])
            for one in others:
                one.had_company |= len(others) > 1
        elif exchange.complete and self._quarantine:
            self._quarantine.clear(exchange.request.identity())

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Send one suspect at a time, so that one that kills a second engine takes no other suspect with it."""
        try:
            await asyncio.wait_for(self._suspects.acquire(), SUSPECT_SECONDS)
        except TimeoutError:
            raise unavailable("the request could not be answered just now; try again shortly") from None
        try:
            yield
        finally:
            self._suspects.release()

    async def _choose(self, request: RoutedRequest, avoided: set[str]) -> tuple[KnownReplica, Route]:
        try:
            return self._table.route(request, avoided)
        except NoReplica:
            await self._wait_for_replica()
        try:
            return self._table.route(request, avoided)
        except NoReplica:
            raise unavailable("no replica is ready; try again shortly") from None

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_probing_socket
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


class _Exchange:
    """One attempt to answer a request by a replica: `begin`, `relay`, and in any case `end`."""

    def __init__(self, table: RoutingTable, replica: KnownReplica, route: Route, request: _Request, send: Send) -> None:
        self.request = request
        self.report: UsageReport | None = None  # the last one of the replica
        self.complete = False
        self.had_company = False  # whether there were other requests when the engine died
        self._id = uuid.uuid4().hex
        self._table = table
        self._replica = replica
        self._route = route
        self._send = send
        self._response: aiohttp.ClientResponse | None = None
        self._first = b""  # piece of the response
        self._event_end = b""  # It is empty for a whole response.
        self._events = 0
        self._tail = b""  # The end of what was relayed so far.
        self._partial = b""  # beginning of an event whose end has not arrived

    @property
    def engine_died(self) -> bool:
        return self.report is not None and self.report.engine_died

    async def begin(self, session: aiohttp.ClientSession, *, may_retry: bool) -> None:
        """Send the request and wait for the beginning of the response; raises `_Failed` if there is none."""
        request, replica = self.request, self._replica.info
        own_headers = [(REPORT_HEADER.decode(), self._id), *_credentials(replica.key, request.key)]
        try:
            response = self._response = await session.request(
                request.method,
                replica.url(request.raw_path, request.query),
                headers=[*request.headers, *own_headers],
                data=request.body or None,
                allow_redirects=False,
            )
            self.report = read_header(response.headers.get(USAGE_HEADER.decode(), "").encode())
            if response.status == 503 and may_retry:  # it drains, or its engine died
                raise _Failed("status 503")
            self._first = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(type(error).__name__) from None

    async def relay(self) -> None:
        """Pass on the response as it arrives."""
        response = self._response
        assert response is not None
        self._table.started(self._route)
        self._event_end = STREAM_ENDS.get(response.content_type, b"")
        await self._send(_start(response))
        try:
            await self._pass_on(self._first)
            async for piece in response.content.iter_any():
                await self._pass_on(piece)
        except (aiohttp.ClientError, OSError) as error:
            await self._cut_short(type(error).__name__)
            return
        self.complete = True
        await self._send({"type": "http.response.body", "body": self._partial})

    def end(self) -> None:
        """Give back the connection and the load, however the attempt ended."""
        if self._response is not None:
            self._response.release() if self.complete else self._response.close()
        # Other responses say nothing of output lengths.
        learns = self.complete and self.request.generates and self.report is not None
        self._table.ended(self._route, self.report.completion_tokens if learns and self.report else None)

    async def _pass_on(self, piece: bytes) -> None:
        """Relay the next piece; of a stream only whole events, so that an error event can follow at any time."""
        if self._event_end:
            whole, end, self._partial = (self._partial + piece).rpartition(self._event_end)
            piece = whole + end
            piece, report = take_comments(piece)
            self.report = report or self.report
            self._events += piece.count(self._event_end)
            self._tail = (self._tail + piece)[-TAIL_BYTES:] if len(piece) < TAIL_BYTES else piece[-TAIL_BYTES:]
        if piece:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _cut_short(self, problem: str) -> None:
        """End a response whose replica died: a stream with an error event, another by closing the connection."""
        log.warning("the replica %s died during a response (%s)", self._replica.id, problem)
        self._table.failed(self._replica.id)
        if not self._event_end:
            raise ConnectionError("the replica died during the response")
        request_id = dict(self.request.headers)["x-request-id"]
        path, tail = self.request.path, self._tail
        events = b"" if is_whole(path, tail) else error_events(path, tail, request_id)
        await self._send({"type": "http.response.body", "body": events})

    async def ask_for_report(self, session: aiohttp.ClientSession) -> UsageReport | None:
        """Ask the replica what a request used whose client has left."""
        replica = self._replica.info
        with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            url, timeout = replica.url(REPORTS_PATH + self._id), aiohttp.ClientTimeout(total=REPORT_SECONDS)
            async with session.get(url, headers=_credentials(replica.key, None), timeout=timeout) as response:
                if response.status == 200:
                    return UsageReport(**await response.json())
        return None

    def estimate(self) -> UsageReport | None:
        """What a stream used, if the replica reports nothing."""
        return UsageReport(self.request.routed.num_prompt, self._events) if self._event_end else None


def _start(response: aiohttp.ClientResponse) -> Message:
    headers = [item for item in response.raw_headers if item[0].lower() not in _OWN_RESPONSE_HEADERS]
    return {
        "type": "http.response.start",
        "status": response.status,
        "headers": [(name.lower(), value) for name, value in headers],
    }


def _request_headers(scope: Scope) -> list[tuple[str, str]]:
    own = _OWN_HEADERS | {
        name.strip().lower()
        for header, value in scope["headers"]
        if header == b"connection"
        for name in value.split(b",")
    }
    kept = [(name, value) for name, value in scope["headers"] if name not in own]
    found = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]
    return [*found, ("x-request-id", scope["state"]["request_id"]), ("accept-encoding", "identity")]


def _credentials(proxy_key: str, key: APIKey | None) -> list[tuple[str, str]]:
    return [("x-api-key", proxy_key), *(() if key is None else client_headers(key).items())]


def _probing_socket(address: Any) -> socket.socket:
    """A socket on which reads and writes fail after some seconds if the other machine does not answer."""
    family, kind, protocol, _, _ = address
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", MAX_PROBES),
        ("TCP_USER_TIMEOUT", 1000 * PROBE_SECONDS * MAX_PROBES),
    ):
        if hasattr(socket, name):  # Not every system has it.
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
