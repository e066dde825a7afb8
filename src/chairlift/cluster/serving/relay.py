"""The ASGI application of the ingress: sends each request to a replica and relays the response.

The request's body is read whole, because the router needs it and a second attempt may too. The response is relayed as
it arrives: a client that reads slowly stops the reading from the replica, and a client that leaves closes the
connection to it, which cancels the request there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from chairlift.cluster.routing.request import RoutedRequest
from chairlift.cluster.routing.router import Route
from chairlift.cluster.serving.error_events import DONE, EVENT_END, error_events
from chairlift.cluster.serving.routed_body import RoutedBody, read_body
from chairlift.cluster.serving.routing_table import KnownReplica, NoReplica, RoutingTable
from chairlift.server.access.keys import APIKey
from chairlift.server.http.errors import APIError, unavailable
from chairlift.server.http.guards import CLIENT_KEY_HEADER, CLIENT_NAME_HEADER, client_headers

log = logging.getLogger("chairlift.cluster")

ATTEMPTS = 2
LARGE_BODY = 200_000  # bytes; parsing more than a millisecond would delay all streams
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 30.0  # less than the servers': they must not close a connection that is about to be used
PROBE_SECONDS, MAX_PROBES = 5, 4  # of idle connections: the machine of a replica may vanish without closing them
USAGE_BYTES = 2048  # at the end of a whole response, where its usage is
# Of one connection only, or set anew here.
_OWN_HEADERS = frozenset(
    (
        b"host connection keep-alive transfer-encoding te trailer upgrade proxy-connection proxy-authorization expect "
        b"content-length accept-encoding authorization x-api-key x-request-id"
    ).split()
) | {CLIENT_NAME_HEADER, CLIENT_KEY_HEADER}
_OWN_RESPONSE_HEADERS = frozenset(b"connection keep-alive transfer-encoding x-request-id date".split())
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)": ?(\d+)')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens)": ?(\d+)')
_GENERATION = re.compile(r"/v1/(chat/)?completions$|/v1/responses$|/v1/messages$")

Connect = Callable[[], Awaitable[None]]


class _Failed(Exception):
    """A replica did not answer; nothing of a response was relayed."""


@dataclass(slots=True)
class _Request:
    method: str
    path: str  # decoded; routes and error events depend on it
    raw_path: str  # as the client wrote it
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    key: APIKey | None
    routed: RoutedRequest
    generates: bool
    streams: bool


class RelayedUsage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int

    def counts(self) -> dict[str, int]:
        """What the access log shows."""
        return self._asdict()


class Relay:
    """Sends requests to the replicas of `table`; `wait_for_replica` returns once there may be one."""

    def __init__(self, table: RoutingTable, wait_for_replica: Connect, *, isolate_keys: bool = False) -> None:
        self._table = table
        self._wait_for_replica = wait_for_replica
        self._isolate_keys = isolate_keys
        self._session: aiohttp.ClientSession | None = None
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_open += 1
        try:
            await self._handle(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._read(scope, receive)
        if (allowance := scope["state"].get("allowance")) is not None:
            await allowance.charge(request.routed.num_prompt + (request.routed.max_output or 0))
        answer = asyncio.create_task(self._answer(request, send, scope["state"]))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            gone.cancel()
            answer.cancel()

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
        generates = scope["method"] == "POST" and bool(_GENERATION.match(path))
        salt = key.digest.hex() if self._isolate_keys and key is not None else ""
        parse = partial(read_body, path, body, with_keys=self._table.reads_prefixes and generates, salt=salt)
        found: RoutedBody = parse() if len(body) < LARGE_BODY else await asyncio.to_thread(parse)
        return _Request(
            method=scope["method"],
            path=path,
            raw_path=scope["raw_path"].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=_request_headers(scope),
            body=body,
            key=key,
            routed=found.request if generates else found.request._replace(max_output=0),
            generates=generates,
            streams=generates and found.streams,
        )

    async def _answer(self, request: _Request, send: Send, state: dict[str, Any]) -> None:
        avoided: set[str] = set()
        for attempt in range(ATTEMPTS):
            replica, route = await self._choose(request.routed, avoided)
            exchange = _Exchange(self._table, replica, route, request, send)
            try:
                await exchange.run(self._connections(), may_retry=attempt + 1 < ATTEMPTS)
                state["usage"] = exchange.usage()  # for the limits of the client's key
                return
            except _Failed as error:
                log.warning("the replica %s does not answer (%s)", replica.id, error)
                self._table.failed(replica.id)
                avoided.add(replica.id)
        raise unavailable("the request could not be answered just now; try again shortly")

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
    """One attempt to answer a request by a replica."""

    def __init__(self, table: RoutingTable, replica: KnownReplica, route: Route, request: _Request, send: Send) -> None:
        self._table = table
        self._replica = replica
        self._route = route
        self._request = request
        self._send = send
        self._events = 0
        self._end = b""  # of what was relayed so far
        self._partial = b""  # beginning of an event whose end has not arrived
        self._complete = False
        self._status = 0

    async def run(self, session: aiohttp.ClientSession, *, may_retry: bool) -> None:
        try:
            await self._run(session, may_retry)
        finally:
            usage = self.usage() if self._request.generates else None  # other responses say nothing of output lengths
            self._table.ended(self._route, None if usage is None else usage.completion_tokens)

    async def _run(self, session: aiohttp.ClientSession, may_retry: bool) -> None:
        request, replica = self._request, self._replica.info
        try:
            response = await session.request(
                request.method,
                replica.url(request.raw_path, request.query),
                headers=[*request.headers, *_credentials(replica.key, request.key)],
                data=request.body or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(type(error).__name__) from None
        try:
            if response.status == 503 and may_retry:  # it drains, or its engine died
                raise _Failed("status 503")
            await self._relay(response)
        finally:
            response.close() if not self._complete else response.release()

    async def _relay(self, response: aiohttp.ClientResponse) -> None:
        pieces = response.content.iter_any()
        try:
            first = await anext(pieces, b"")
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(type(error).__name__) from None
        self._table.started(self._route)
        self._status = response.status
        await self._send(_start(response))
        try:
            await self._pass_on(first)
            async for piece in pieces:
                await self._pass_on(piece)
        except (aiohttp.ClientError, OSError) as error:
            await self._cut_short(response, type(error).__name__)
            return
        self._complete = True
        await self._send({"type": "http.response.body", "body": self._partial})

    async def _pass_on(self, piece: bytes) -> None:
        """Relay the next piece; of a stream only whole events, so that an error event can follow at any time."""
        if self._request.streams:
            piece = self._partial + piece
            end = len(piece) if piece.endswith(EVENT_END) else piece.rfind(EVENT_END) + len(EVENT_END)
            end = 0 if end < len(EVENT_END) else end
            piece, self._partial = piece[:end], piece[end:]
            self._events += piece.count(b"data: ")
            if not piece:
                return
        self._end = (self._end + piece)[-USAGE_BYTES:] if len(piece) < USAGE_BYTES else piece[-USAGE_BYTES:]
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _cut_short(self, response: aiohttp.ClientResponse, problem: str) -> None:
        """End a response whose replica died: a stream with an error event, another by closing the connection."""
        log.warning("the replica %s died during a response (%s)", self._replica.id, problem)
        self._table.failed(self._replica.id)
        if response.content_type != "text/event-stream":
            raise ConnectionError("the replica died during the response")
        request_id = dict(self._request.headers)["x-request-id"]
        events = b"" if self._end.endswith(DONE) else error_events(self._request.path, self._end, request_id)
        await self._send({"type": "http.response.body", "body": events})

    def usage(self) -> RelayedUsage | None:
        """The tokens of a response that was relayed whole; without its own figures, each event counts as a token."""
        if not self._complete or self._status >= 400:
            return None
        prompt, output = _PROMPT_TOKENS.findall(self._end), _OUTPUT_TOKENS.findall(self._end)
        if not prompt and not self._request.generates:
            return None
        return RelayedUsage(
            int(prompt[-1]) if prompt else self._request.routed.num_prompt, int(output[-1]) if output else self._events
        )


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
        if hasattr(socket, name):  # not on every system
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
