"""Middleware before all routes: request ids, API keys or host names, and limits on headers and bodies.

These are plain ASGI applications, so that streams pass through without buffering.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import is_full
from chairlift.server.access.keys import APIKey, KeyTable
from chairlift.server.generation.shares import SharedLimit
from chairlift.server.http.errors import APIError, as_api_error, too_busy
from chairlift.server.http.host_names import HostNames
from chairlift.server.http.json_size import ValueCounter
from chairlift.server.limits import Limits
from chairlift.server.metrics import Metrics

log = logging.getLogger("chairlift.server")

PROBE_PATHS = frozenset({"/health", "/ready", "/ping"})  # without a key and for any host name: they reveal nothing else
METRICS_PATH = "/metrics"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
UPLOAD_PATH = "/v1/files"
# Sent by a proxy that authenticates clients itself: the name of the client's key, quoted, and its digest.
CLIENT_NAME_HEADER, CLIENT_KEY_HEADER = b"x-chairlift-client", b"x-chairlift-client-key"
CLOSE = {"Connection": "close"}  # for requests whose end is not certain


class OutermostMiddleware:
    """Adds a request id to every response, answers HEAD on every GET route, and turns unexpected errors into 500s."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_request_id(dict(scope["headers"])) or f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        # uvicorn omits the body of a response to HEAD.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._app(inner, receive, send_with_id)
        except Exception as error:
            # Log the traceback without the error's message, which may quote a prompt.
            frames = "" if is_full(error) else "\n" + "".join(traceback.format_tb(error.__traceback__))
            log.error("%s in the request %s%s", type(error).__name__, request_id, frames)
            if not started:  # otherwise the response ends early and uvicorn closes the connection
                await as_api_error(error).response()(scope, receive, send_with_id)


class RequestGuard:
    """Authenticates requests and enforces the limits on headers and bodies."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyTable,
        hosts: HostNames,
        limits: Limits,
        metrics: Metrics,
        public_metrics: bool = False,
        uploads: bool = False,
        isolate_keys: bool = False,
    ) -> None:
        """`uploads`: whether `app` keeps files, whose bodies are longer and are not held in memory. `isolate_keys`:
        whether only administrators see what concerns all keys."""
        self._app = app
        self._isolate_keys = isolate_keys
        self._uploads = uploads
        self._any_host_paths = PROBE_PATHS | ({METRICS_PATH} if public_metrics else set())
        # The page asks for the key; "/" only says that there is a server, before a client sends its key.
        self._keyless_paths = self._any_host_paths | {"/dashboard", "/"}
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._held = SharedLimit(limits.max_held_bytes, limits.tenant_weights)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["arrived"], state["timelines"] = time.monotonic(), {}
        state["is_proxied"] = False
        key = state["api_key"] = self._key(scope)
        state["key"], state["tenant"] = (None, None) if key is None else (key.digest, key.name)
        is_admin = key is not None and (key.is_admin or key.is_proxy)
        state["sees_all"] = is_admin or not self._isolate_keys or scope["path"] in self._any_host_paths
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        limited = _LimitedUpload if self._is_upload(scope) else _LimitedBody
        body = limited(receive, self._limits, self._held, self._metrics, state)
        try:
            await self._app(scope, body, send)
        finally:
            body.release()

    def _key(self, scope: Scope) -> APIKey | None:
        """Return the client's API key, or None if it is missing or wrong."""
        headers = dict(scope["headers"])
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        found = self._keys.find(secret.strip()) if scheme.lower() == b"bearer" else None
        found = found or self._keys.find(headers.get(b"x-api-key", b""))  # the header of Anthropic's clients
        if found is None or not found.is_proxy:
            return found
        scope["state"]["is_proxied"] = True
        return client_key(found, headers)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if refused := _bad_target(scope):
            return refused
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._limits.max_headers or size > self._limits.max_header_bytes:
            problem = f"more than {self._limits.max_headers} headers or {self._limits.max_header_bytes} bytes of them"
            return APIError(431, problem, code="headers_too_large")
        if ambiguous := _ambiguity(headers):
            return ambiguous
        if self._keys and scope["state"]["key"] is None and scope["path"] not in self._keyless_paths:
            problem = "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return APIError(401, problem, type_="authentication_error", code="invalid_api_key")
        if not self._keys and scope["path"] not in self._any_host_paths:
            host = dict(headers).get(b"host", b"").decode("latin-1")
            if not self._hosts.allow(host):
                problem = f"this server has no API keys and does not answer to the name {host[:300]!r}"
                way_out = "start it with --allowed-host NAME, or with keys, or call it by its address"
                return APIError(403, f"{problem}; {way_out}", code="host_not_allowed")
        if not self._keys and scope["method"] not in SAFE_METHODS and not self._hosts.allow_page(dict(headers)):
            problem = "this server has no API keys and takes nothing from web pages of other origins"
            return APIError(403, f"{problem}; start it with --cors-origin ORIGIN", code="origin_not_allowed")
        packing = dict(headers).get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if packing not in ("", "identity"):
            problem = f"bodies are not unpacked here; send them without Content-Encoding, got {packing[:40]!r}"
            return APIError(415, problem, code="unsupported_media_type")
        length = dict(headers).get(b"content-length", b"0")
        most = self._limits.max_file_bytes if self._is_upload(scope) else self._limits.max_body_bytes
        if length.isdigit() and int(length) > most:
            return _too_large(most)
        return None

    def _is_upload(self, scope: Scope) -> bool:
        return bool(self._uploads and scope["method"] == "POST" and scope["path"] == UPLOAD_PATH)


def check_sees_all(state: State) -> None:
    """Raise unless the client of a request may see what concerns all keys."""
    if not state.sees_all:
        problem = "this server isolates its keys (--isolate-keys), and this is only for those with 'admin: true'"
        raise APIError(403, problem, code="not_allowed")


def client_key(proxy: APIKey, headers: Mapping[bytes, bytes]) -> APIKey:
    """Return the key that a proxy has authenticated, or its own, which names no tenant."""
    name, digest = headers.get(CLIENT_NAME_HEADER, b""), headers.get(CLIENT_KEY_HEADER, b"")
    return APIKey(unquote(name.decode("ascii")), digest) if name else proxy


def client_headers(key: APIKey) -> dict[str, str]:
    """Return the headers with which a proxy sends a client's key."""
    return {CLIENT_NAME_HEADER.decode(): quote(key.name), CLIENT_KEY_HEADER.decode(): key.digest.hex()}


def _bad_target(scope: Scope) -> APIError | None:
    """Return the refusal of a target that is no path: "%2F@HOST" decodes to one, but names a host where it is appended
    to an address. No client sends a fragment."""
    raw_path = scope.get("raw_path") or scope["path"].encode()  # ASGI does not require it
    if raw_path.startswith(b"/") and b"#" not in raw_path + scope["query_string"]:
        return None
    problem = "the target of a request must begin with '/' and have no '#'"
    return APIError(400, problem, code="bad_http", headers=CLOSE)


def _ambiguity(headers: list[tuple[bytes, bytes]]) -> APIError | None:
    """Return the refusal of headers that a proxy in front of the server may understand differently."""
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        problem = "send either Content-Length or Transfer-Encoding, not both"
        return APIError(400, problem, code="bad_http", headers=CLOSE)
    if names.count(b"authorization") > 1:
        return APIError(400, "send one Authorization header", code="bad_http", headers=CLOSE)
    expected = [value.decode("latin-1") for name, value in headers if name == b"expect"]
    if any(value.strip().lower() != "100-continue" for value in expected):
        problem = f"cannot meet the expectation {expected[0][:100]!r}; the only known one is 100-continue"
        return APIError(417, problem, code="bad_http", headers=CLOSE)
    return None


class _LimitedBody:
    """An ASGI `receive` that limits a body's bytes, values and time of arrival.

    The byte limit does not rely on Content-Length. A request has arrived when its body is complete.
    """

    def __init__(
        self, receive: Receive, limits: Limits, held: SharedLimit, metrics: Metrics, state: dict[str, Any]
    ) -> None:
        """`held` are the bytes of the bodies of all requests in flight."""
        self._receive = receive
        self._limits = limits
        self._held = held
        self._metrics = metrics
        self._state = state
        self._tenant: str = state["tenant"] or ""
        self._size = 0
        self._values = ValueCounter()
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + limits.body_seconds

    async def __call__(self) -> Message:
        if self._complete:  # the next message is the disconnect, without a time limit
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            problem = f"the body did not arrive within {self._limits.body_seconds:g} seconds"
            raise APIError(408, problem, type_="timeout_error", code="timeout") from None
        self._check(message.get("body", b""))
        if not message.get("more_body", False):
            self._complete = True
            self._state["arrived"] = time.monotonic()
        return message

    def _check(self, piece: bytes) -> None:
        """Raise if the body exceeds a limit with its next piece."""
        if b"\0" in piece:  # UTF-16 or UTF-32: the JSON parser reads them, but the value counter cannot
            raise APIError(400, "the body must be text in UTF-8", code="invalid_json")
        has_room = self._held.has_room(self._tenant, len(piece))
        self._size += len(piece)
        self._held.take(self._tenant, len(piece))
        if self._size > self._limits.max_body_bytes:
            raise _too_large(self._limits.max_body_bytes)
        if not has_room:
            self._metrics.refused.labels("429").inc()
            raise too_busy("the server holds too many large requests; try again in a moment")
        self._values.feed(piece)
        if self._values.count > self._limits.max_body_values:
            raise APIError(400, f"the body has more than {self._limits.max_body_values} values", code="too_many_values")

    def release(self) -> None:
        self._held.give_back(self._tenant, self._size)


class _LimitedUpload(_LimitedBody):
    """The body of an upload: it may be longer and is not JSON, and only a part of it is in memory."""

    def __init__(
        self, receive: Receive, limits: Limits, held: SharedLimit, metrics: Metrics, state: dict[str, Any]
    ) -> None:
        super().__init__(receive, limits, held, metrics, state)
        self._deadline = asyncio.get_running_loop().time() + limits.file_seconds
        self._uploaded = 0

    def _check(self, piece: bytes) -> None:
        self._uploaded += len(piece)
        if self._uploaded > self._limits.max_file_bytes:
            raise _too_large(self._limits.max_file_bytes)


def _too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _client_request_id(headers: dict[bytes, bytes]) -> str | None:
    given = headers.get(b"x-request-id", b"").decode("ascii", "ignore")
    return given if 0 < len(given) <= 128 and given.isprintable() else None
