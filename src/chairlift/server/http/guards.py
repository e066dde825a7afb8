"""The inner middleware: what is checked and counted of each request before it is routed.

It finds the API key or checks the host name, applies the limits on headers and bodies and those of the key, and counts
the tokens and the ignored fields.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey, KeyTable, RateLimits
from chairlift.server.generation.usage import REPORT_HEADER, REPORTS_PATH, UsageReport, UsageReports, send_with_reports
from chairlift.server.http.bodies import LimitedBody, LimitedUpload, too_large
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.limits import Limits, SharedLimit
from chairlift.server.wire.unknown_fields import (
    HEADER,
    IgnoredFieldsLog,
    UnknownFields,
    UnknownFieldsRule,
    ignored_fields,
)

PROBE_PATHS = frozenset({"/health", "/ready", "/ping"})  # They reveal nothing, so need no key and take any host name.
METRICS_PATH = "/metrics"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
UPLOAD_PATH = "/v1/files"
# Sent by a proxy that authenticates clients itself: the name of the client's key, quoted, its digest and its class.
CLIENT_NAME_HEADER, CLIENT_KEY_HEADER = b"x-chairlift-client", b"x-chairlift-client-key"
CLIENT_CLASS_HEADER = b"x-chairlift-client-class"
CLOSE = {"Connection": "close"}  # Where a request ends is not certain.


@dataclass(eq=False, kw_only=True)
class RequestMeter:
    """Counts what requests use, which the guards have let pass: it applies the limits of their keys, reports tokens to
    proxies, and says in the response which fields of the request were ignored."""

    app: ASGIApp = field(kw_only=False)
    rate_limits: RateLimits | None = None
    unknown_fields: UnknownFieldsRule = "ignore"
    _ignored_fields: IgnoredFieldsLog = field(default_factory=IgnoredFieldsLog, init=False)
    _reports: UsageReports = field(default_factory=UsageReports, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._answer if scope["type"] == "http" else self.app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the tokens of a request for the proxy that has sent it, if it asks for them."""
        state = scope["state"]
        report_id = ""
        if state.get("is_proxied"):
            report_id = dict(scope["headers"]).get(REPORT_HEADER, b"").decode("latin-1")
            if not report_id and scope["path"].startswith(REPORTS_PATH):
                await self._reports.answer(scope["path"].removeprefix(REPORTS_PATH))(scope, receive, send)
                return
        if not report_id:
            await self._limit_rate(scope, receive, send)
            return
        self._reports.begin(report_id, state)
        try:
            await self._limit_rate(scope, receive, send_with_reports(send, state))
        finally:
            self._reports.end(report_id, state)

    async def _limit_rate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request of a key with limits, and add OpenAI's rate limit headers to its response."""
        state = scope["state"]
        state["allowance"] = None
        key: APIKey | None = state["api_key"]
        if key is None or not key.limits or scope["method"] != "POST" or self.rate_limits is None:
            await self._name_ignored(scope, receive, send)
            return
        try:
            allowance = await self.rate_limits.begin(key)
        except APIError as refusal:
            await refusal.response()(scope, receive, send)
            return
        state["allowance"] = allowance
        status = 0

        async def send_with_limits(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name for name, _ in message["headers"]}  # a refusal has its own
                headers = [(name.encode(), value.encode()) for name, value in allowance.headers.items()]
                message["headers"] = [*message["headers"], *(item for item in headers if item[0] not in names)]
            await send(message)

        try:
            await self._name_ignored(scope, receive, send_with_limits)
        finally:
            report = UsageReport.of_request(state)
            used = None if report is None else report.prompt_tokens + report.completion_tokens
            allowance.settle(0 if report is None and status >= 400 else used)

    async def _name_ignored(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the fields that the readers of the body ignore, in the response and in the log."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        fields = UnknownFields(self.unknown_fields)

        async def send_with_ignored(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := fields.header()):
                message["headers"] = [*message["headers"], (HEADER.encode(), names.encode("ascii"))]
                self._ignored_fields.note(_client_name(scope), names)
            await send(message)

        token = ignored_fields.set(fields)
        try:
            await self.app(scope, receive, send_with_ignored)
        finally:
            ignored_fields.reset(token)


def _client_name(scope: Scope) -> str:
    """Return the tenant or the address of a client, for the log."""
    if tenant := scope["state"].get("tenant"):
        return str(tenant)
    if "client" not in scope:  # The server itself sends the lines of batches.
        return "of a batch"
    return str(scope["client"][0]) if scope["client"] else "of a Unix socket"


@dataclass(eq=False, kw_only=True)
class RequestGuard(RequestMeter):
    """Authenticates requests and enforces the limits on headers and bodies, before it counts them."""

    keys: KeyTable
    hosts: HostNames
    limits: Limits
    metrics: Metrics
    public_metrics: bool = False
    uploads: bool = False  # whether `app` keeps files, whose bodies are longer and are not held in memory
    isolate_keys: bool = False  # whether only administrators see what concerns all keys

    def __post_init__(self) -> None:
        self._any_host_paths = PROBE_PATHS | ({METRICS_PATH} if self.public_metrics else set())
        # The dashboard asks for the key; "/" and "/docs" say nothing about the model.
        self._keyless_paths = self._any_host_paths | {"/dashboard", "/docs", "/"}
        self._held = SharedLimit(self.limits.max_held_bytes, self.limits.tenant_weights)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["arrived"], state["timelines"] = time.monotonic(), {}
        state["is_proxied"] = False
        key = state["api_key"] = None if self.keys.is_empty else self._key(scope)
        state["key"], state["tenant"] = (None, None) if key is None else (key.digest, key.name)
        state["has_access"] = key is not None or self.keys.is_empty
        is_admin = key is not None and (key.is_admin or key.is_proxy)
        state["sees_all"] = is_admin or not self.isolate_keys or scope["path"] in self._any_host_paths
        if refusal := self._refusal(scope, dict(scope["headers"])):
            await refusal.response()(scope, receive, send)
            return
        is_upload, limits, loop = self._is_upload(scope), self.limits, asyncio.get_running_loop()
        deadline = loop.time() + (limits.file_seconds if is_upload else limits.body_seconds)
        limited = LimitedUpload if is_upload else LimitedBody
        body = limited(receive, limits, self._held, self.metrics, state, state["tenant"] or "", deadline)
        try:
            await super()._answer(scope, body, send)
        finally:
            body.release()

    def _key(self, scope: Scope) -> APIKey | None:
        """Return the client's API key, or None if it is missing or wrong."""
        headers = dict(scope["headers"])
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        key = self.keys.find(secret.strip()) if scheme.lower() == b"bearer" else None
        key = key or self.keys.find(headers.get(b"x-api-key", b""))  # the header of Anthropic's clients
        if key is None or not key.is_proxy:
            return key
        scope["state"]["is_proxied"] = True
        # The key that the proxy has authenticated, or its own, which names no tenant.
        name, digest = headers.get(CLIENT_NAME_HEADER, b""), headers.get(CLIENT_KEY_HEADER, b"")
        if not name:
            return key
        service_class = headers.get(CLIENT_CLASS_HEADER, b"").decode("latin-1")
        return APIKey(unquote(name.decode("ascii")), digest, service_class=service_class)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> APIError | None:
        return (
            _bad_target(scope)
            or self._too_many_headers(scope)
            or _ambiguity(scope["headers"])
            or (self._other_sender(scope, headers) if self.keys.is_empty else self._missing_key(scope))
            or _packed_body(headers)
            or self._too_large_body(scope, headers)
        )

    def _too_many_headers(self, scope: Scope) -> APIError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= self.limits.max_headers and size <= self.limits.max_header_bytes:
            return None
        problem = f"more than {self.limits.max_headers} headers or {self.limits.max_header_bytes} bytes of them"
        return APIError(431, problem, code="headers_too_large")

    def _missing_key(self, scope: Scope) -> APIError | None:
        if scope["state"]["key"] is not None or scope["path"] in self._keyless_paths:
            return None
        problem = "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        return APIError(401, problem, type_="authentication_error", code="invalid_api_key")

    def _other_sender(self, scope: Scope, headers: Mapping[bytes, bytes]) -> APIError | None:
        """Return the refusal of another host name or of a page of another origin, which a server without keys gives."""
        if scope["path"] not in self._any_host_paths:
            host = headers.get(b"host", b"").decode("latin-1")
            if not self.hosts.allow(host):
                problem = f"this server has no API keys and does not answer to the name {host[:300]!r}"
                way_out = "start it with --allowed-host NAME, or with keys, or call it by its address"
                return APIError(403, f"{problem}; {way_out}", code="host_not_allowed")
        if scope["method"] not in SAFE_METHODS and not self.hosts.allow_page(headers):
            problem = "this server has no API keys and takes nothing from web pages of other origins"
            return APIError(403, f"{problem}; start it with --cors-origin ORIGIN", code="origin_not_allowed")
        return None

    def _too_large_body(self, scope: Scope, headers: Mapping[bytes, bytes]) -> APIError | None:
        length = headers.get(b"content-length", b"0")
        most = self.limits.max_file_bytes if self._is_upload(scope) else self.limits.max_body_bytes
        return too_large(most) if length.isdigit() and int(length) > most else None

    def _is_upload(self, scope: Scope) -> bool:
        return bool(self.uploads and scope["method"] == "POST" and scope["path"] == UPLOAD_PATH)


def check_sees_all(state: State) -> None:
    """Raise unless the client of a request may see what concerns all keys."""
    if not state.sees_all:
        problem = "this server isolates its keys (--isolate-keys), and this is only for those with 'admin: true'"
        raise APIError(403, problem, code="not_allowed")


def client_headers(key: APIKey) -> dict[str, str]:
    """Return the headers with which a proxy sends a client's key."""
    headers = {CLIENT_NAME_HEADER.decode(): quote(key.name), CLIENT_KEY_HEADER.decode(): key.digest.hex()}
    return headers | ({CLIENT_CLASS_HEADER.decode(): key.service_class} if key.service_class else {})


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


def _packed_body(headers: Mapping[bytes, bytes]) -> APIError | None:
    packing = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if packing in ("", "identity"):
        return None
    problem = f"bodies are not unpacked here; send them without Content-Encoding, got {packing[:40]!r}"
    return APIError(415, problem, code="unsupported_media_type")


ANY = "*"


class HostNames:
    """Protects a server without API keys from web pages.

    The first check is against DNS rebinding. A browser lets a page call the server that it came from. The owner of a
    domain can point its name at a server on your machine or network after the page has loaded, and the browser then
    treats that server as the page's own. But the browser still sends the name in the Host header. Numeric addresses
    cannot be rebound, so they are allowed.

    The second check is against pages of other origins. A browser asks the server before it lets such a page send JSON,
    but not before it sends a form, as an upload is. It always names the page's origin.
    """

    def __init__(self, listens_on: str = "127.0.0.1", allowed: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """`origins` are those of pages that may call the server."""
        self._origins = frozenset(origins)
        names = [_checked(name) for name in allowed]
        self._any = ANY in names
        self._names = {"localhost", listens_on.lower(), socket.gethostname().lower(), *names}

    def allow(self, host: str) -> bool:
        """Return whether a Host header is allowed. An empty one is, since browsers never send it."""
        host = host.strip().lower()
        # An IPv6 address is in brackets.
        name = (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).removesuffix(".")
        return self._any or not name or name in self._names or name.endswith(".localhost") or _is_address(name)

    def allow_page(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the page that sends a request may do so. Clients that are no browsers are allowed."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"").decode("latin-1")
        if site in (b"same-origin", b"none") or ANY in self._origins or origin in self._origins:
            return True
        if not origin:
            return site is None
        host = headers.get(b"host", b"").decode("latin-1")
        return origin.partition("://")[2].lower() == host.strip().lower() != ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _checked(name: str) -> str:
    if not name.isascii() or not name.strip() or any(part in name for part in "/:@ "):
        raise InvalidParameter("allowed_host", f"must be the name of a host, without scheme or port, and not {name!r}")
    return name.lower()
