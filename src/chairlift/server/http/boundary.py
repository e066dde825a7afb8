"""The outer middleware: it names each request, makes each error one that the client can read, and writes requests down.

Both middlewares are plain ASGI applications, so that streams pass through without buffering. What is written down has
neither prompts nor outputs. The access log has one JSON line for each request. OpenTelemetry gets one span for each
POST request, with its phases in the engine as children; these are made when the response has ended, from times that
were measured anyway, so tracing costs a stream nothing while it runs.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import chairlift
from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.errors import MESSAGES_PATH, VERSION_HEADER, AnthropicSend
from chairlift.server.generation.traffic import Traffic
from chairlift.server.generation.usage import Timeline
from chairlift.server.llamacpp.errors import LLAMACPP_PATHS, llamacpp_error
from chairlift.server.ollama.errors import OLLAMA_PATHS, OLLAMA_PREFIX, ollama_error
from chairlift.server.options import STANDARD_OUTPUT
from chairlift.server.wire.errors import ConvertingSend, ErrorFormat, as_api_error, log_unexpected

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("chairlift.server")

# Clients join a base URL and a path in every way: without /v1, or with two slashes. The guards, the limits, the routes
# and the log all see the endpoint's own path, because it is replaced before any of them.
_UNDER_V1 = (
    *("/chat/completions", "/completions", "/responses", "/responses/compact", "/responses/input_tokens"),
    *("/messages", "/messages/count_tokens", "/messages/batches", "/embeddings", "/models", "/conversations"),
    *("/files", "/batches"),
)
_PATHS = frozenset(
    (
        *(f"/v1{path}" for path in _UNDER_V1),
        *("/v1/score", "/v1/rerank", "/v2/rerank", "/score", "/rerank", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/ping", "/version", "/metrics", "/dashboard", "/docs"),
        *OLLAMA_PATHS,
        *LLAMACPP_PATHS,
    )
)
# What follows is a name or an id, which may have slashes of its own.
_WITH_ID = re.compile(r"/+(?:v1/+)?(models|files|batches|messages/batches|responses|conversations)/(.+)", re.DOTALL)


def endpoint_path(path: str) -> str:
    """Return the path of the endpoint that a client means; other paths are returned unchanged."""
    single = re.sub(r"/{2,}", "/", path)
    for known in (single, f"/v1{single}"):
        if known in _PATHS:
            return known
    if single == "/v1/health":
        return "/health"
    if found := _WITH_ID.fullmatch(path):
        return f"/v1/{found[1]}/{found[2]}"
    return path


def _foreign_errors(path: str) -> ErrorFormat | None:
    """Return the form of the errors of Ollama's and llama.cpp's paths. These servers also read every body as JSON,
    whatever type it says: curl, as their documents show it, says that it sends a form."""
    if path.startswith(OLLAMA_PREFIX):
        return ollama_error
    return llamacpp_error if path in LLAMACPP_PATHS else None


def _other_headers(scope: Scope, name: bytes) -> list[tuple[bytes, bytes]]:
    return [item for item in scope["headers"] if item[0] != name]


MAX_ERROR_BYTES = 4096


class SentResponse:
    """The response to one request, as far as it was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.head: Message = {}  # empty: the client disconnected before there was a response
        self.is_complete = False
        self.first_body: float | None = None  # when the body began
        self.error = b""  # the beginning of an error's body

    @property
    def status(self) -> int | None:
        return self.head.get("status")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head = message
        else:
            self._see_body(message)
        await self._send(message)

    def _see_body(self, message: Message) -> None:
        if self.first_body is None and message.get("body"):
            self.first_body = time.monotonic()
        if self.head.get("status", 0) >= 400 and len(self.error) < MAX_ERROR_BYTES:
            self.error += message.get("body", b"")[:MAX_ERROR_BYTES]
        if not message.get("more_body", False):
            self.is_complete = True


class Observer(Protocol):
    """Watches requests."""

    def begin(self, scope: Scope) -> Callable[[SentResponse], None]:
        """Note that a request has arrived; what is returned is called when its response has ended."""
        ...


class RequestBoundary:
    """Gives every layer the endpoint's own path and every response a request id; answers HEAD on every GET route, turns
    unexpected errors into 500s, and converts errors for Anthropic's clients."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Observer] = ()) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("ascii", "ignore")
        if not 0 < len(request_id) <= 128 or not request_id.isprintable():
            request_id = f"req-{uuid.uuid4().hex}"
        scope = {**scope, "path": endpoint_path(scope["path"])}
        if scope["method"] == "POST" and _foreign_errors(scope["path"]) is not None:
            scope["headers"] = [*_other_headers(scope, b"content-type"), (b"content-type", b"application/json")]
        scope.setdefault("state", {})["request_id"] = request_id
        sent = SentResponse(send)
        endings = [observer.begin(scope) for observer in self._observers]
        try:
            await self._answer(scope, receive, sent.send, request_id)
        finally:
            for end in reversed(endings):
                end(sent)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        speaks_anthropic = MESSAGES_PATH.match(scope["path"]) or VERSION_HEADER in dict(scope["headers"])
        outgoing: Send = AnthropicSend(send) if speaks_anthropic else send
        if (convert := _foreign_errors(scope["path"])) is not None:
            outgoing = ConvertingSend(send, convert)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await outgoing(message)

        # uvicorn omits the body of a response to HEAD.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._app(inner, receive, send_with_id)
        except ClientDisconnect:  # while its body was read, so it reads no answer
            pass
        except Exception as error:
            log_unexpected(error, request_id)
            if not started:  # otherwise the response ends early and uvicorn closes the connection
                await as_api_error(error).response()(scope, receive, send_with_id)


class AccessLog:
    """Writes a line when a response has ended, also if the client disconnected."""

    def __init__(self, log: logging.Handler, key: str) -> None:
        """`key`: with it, the blocks of prompts are hashed."""
        self._handler = log
        self._key = key

    def begin(self, scope: Scope) -> Callable[[SentResponse], None]:
        start, time_of_day = time.monotonic(), datetime.now(UTC)
        traffic = scope["state"]["traffic"] = Traffic(self._key)

        def end(sent: SentResponse) -> None:
            state, client = scope["state"], scope.get("client")
            headers, usage = dict(sent.head.get("headers", ())), state.get("usage")
            line = {
                "request_id": headers.get(b"x-request-id", b"").decode("latin-1"),
                "client": client[0] if client else None,
                "trace_id": state.get("trace_id"),
                "tenant": state.get("tenant"),
                "method": scope["method"],
                "path": scope["path"],
                "status": sent.status,  # null: the client disconnected before there was a response
                "complete": sent.is_complete,  # whether all of the response was sent
                **({} if usage is None else usage.counts()),
                **traffic.facts(state.get("timelines", {})),
                "time": time_of_day.isoformat(timespec="milliseconds"),
                "seconds": time.monotonic() - start,
            }
            text = msgspec.json.encode(line).decode()
            self._handler.handle(logging.LogRecord("chairlift.access", logging.INFO, "", 0, text, None, None))

        return end


def open_access_log(file: Path) -> logging.Handler:
    """Open the log; raise if it cannot be written. A file is opened anew if it was moved by logrotate."""
    try:
        to_output = file == STANDARD_OUTPUT
        handler = logging.StreamHandler(sys.stdout) if to_output else WatchedFileHandler(file, encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("access_log", f"cannot write {str(file)!r}: {error.strerror}") from None
    handler.handleError = _report_unwritable  # type: ignore[method-assign]
    return handler


def _report_unwritable(record: logging.LogRecord) -> None:
    """Say that a line cannot be written, instead of printing a traceback."""
    log.error("cannot write the access log: %s", sys.exc_info()[1])


OPTION = "otlp_traces_endpoint"
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_TRACE_PATH = "/v1/traces"


def check_traces_endpoint(endpoint: str) -> None:
    """Raise unless traces can be sent there, as far as can be known before."""
    for package in PACKAGES:
        if not _is_installed(package):
            way_out = "pip install 'chairlift[otel]', or in a clone pip install -e '.[otel]'"
            raise InvalidParameter(OPTION, f"needs {package}: {way_out}")
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidParameter(OPTION, f"must be an http:// or https:// address, got {endpoint!r}")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # Not even the package around it is there.
        return False


def make_tracer_provider(endpoint: str) -> TracerProvider:
    """Return a provider that exports to an OTLP endpoint over HTTP. The OTEL_* variables apply as usual."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint if endpoint.rstrip("/").endswith(_TRACE_PATH) else endpoint.rstrip("/") + _TRACE_PATH
    resource = Resource.create({SERVICE_NAME: "chairlift", SERVICE_VERSION: chairlift.__version__})
    provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class Tracing:
    """Makes the spans. The parent is the client's span, if it sends a `traceparent` header."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._model = model
        self._tracer: Tracer = provider.get_tracer("chairlift", chairlift.__version__)

    def begin(self, scope: Scope) -> Callable[[SentResponse], None]:
        if scope["method"] != "POST":
            return lambda sent: None
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = f"{scope['method']} {scope['path']}"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context = TraceContextTextMapPropagator().extract(headers)  # what the client sends in W3C's headers
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER)
        scope["state"]["trace_id"] = f"{span.get_span_context().trace_id:032x}"

        def end(sent: SentResponse) -> None:
            status = sent.status or 0
            span.set_attributes(_attributes(scope, self._model, status))
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            for timeline in scope["state"].get("timelines", {}).values():
                self._add_phases(span, timeline)
            span.end()

        return end

    def _add_phases(self, parent: Span, timeline: Timeline) -> None:
        from opentelemetry.trace import set_span_in_context

        context, offset = set_span_in_context(parent), time.time_ns() - time.monotonic_ns()
        for phase, (start, end) in timeline.phases().items():
            span = self._tracer.start_span(phase, context, start_time=offset + int(start * 1e9))
            if phase == "decode":
                span.set_attributes({"gen_ai.usage.output_tokens": timeline.num_tokens})
                if timeline.finish_reason is not None:
                    span.set_attribute("gen_ai.response.finish_reasons", [timeline.finish_reason])
            span.end(offset + int(end * 1e9))


def _attributes(scope: Scope, model: str, status: int) -> Mapping[str, Any]:
    """Return OpenTelemetry's attributes for HTTP and generative models. They hold no text."""
    state = scope["state"]
    found: dict[str, Any] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.response.status_code": status,
        "gen_ai.system": "chairlift",
        "gen_ai.response.model": model,
    }
    if state.get("tenant"):
        found["enduser.id"] = state["tenant"]
    usage = state.get("usage")
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cached_tokens"] = usage.cached_tokens
    return found
