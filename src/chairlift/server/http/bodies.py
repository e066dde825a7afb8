"""Limits on request bodies, and their parsing, of large ones in threads.

Parsing a body with the largest allowed number of values takes tens of milliseconds, and validating it takes as long.
Both hold the GIL, so streams wait meanwhile; the limit on values bounds this time. Threads let the streams run between
the two, and between bodies when many arrive at once.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from chairlift.server.generation.admission import Admission
from chairlift.server.generation.endpoint import EngineBody, invalid_field
from chairlift.server.generation.tokenizer_pool import FairThreads
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import APIError, as_api_error, too_busy
from chairlift.server.wire.limits import Limits, SharedLimit

LARGE_BODY = 20_000  # bytes
# Digits of an integer: no parameter has as many, and to read thousands of long ones takes a fraction of a second.
MAX_DIGITS = 400

_ESCAPED = re.compile(rb"\\.", re.DOTALL)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def threaded_body_route(admission: Admission, weights: Mapping[str, float] | None = None) -> type[APIRoute]:
    """Return a route class that parses large bodies in threads after the request is admitted."""
    threads = FairThreads("body", 2, weights)

    class Route(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()
            model = None if self.body_field is None else self.body_field.field_info.annotation
            if not isinstance(model, type) or not issubclass(model, BaseModel):
                return handle
            body_type: type[BaseModel] = model

            async def handle_body(request: Request) -> Response:
                body = _Body(request, body_type, admission, threads)
                try:
                    async with body.until_disconnect, AsyncExitStack() as request.state.parsing:
                        return await handle(body)
                except TimeoutError:
                    if not body.until_disconnect.expired():
                        raise
                    raise APIError(499, "the client closed the connection", type_="client_closed") from None
                finally:
                    body.stop_watching()

            return handle_body

    return Route


class _Body(Request):
    """A request that ends when its client disconnects. For a large body its `json()` returns a validated model, which
    FastAPI accepts."""

    def __init__(
        self, request: Request, body_type: type[BaseModel], admission: Admission, threads: FairThreads
    ) -> None:
        super().__init__(request.scope, request.receive)
        self._body_type = body_type
        self._admission = admission
        self._threads = threads
        self.until_disconnect = asyncio.timeout(None)
        self._watch: asyncio.Future[Message] | None = None

    async def json(self) -> Any:
        body = await self.body()
        self._watch = asyncio.ensure_future(self.receive())  # After a whole body, only the disconnect is received.
        self._watch.add_done_callback(self._on_disconnect)
        if len(body) < LARGE_BODY:
            return await super().json()
        await self._reserve()
        return await self._threads.run(self.state.tenant or "", len(body), partial(_parse, self._body_type, body))

    def _on_disconnect(self, watch: asyncio.Future[Message]) -> None:
        if self._watch is not None and not watch.cancelled():
            self.until_disconnect.reschedule(0.0)

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # A disconnect may have been received already; it has no effect from now on.

    async def _reserve(self) -> None:
        """Reserve one completion, so that bodies of refused requests are not parsed; their real number is not known
        yet. It is held until the request reserves that, in the same step of the event loop."""
        held, tenant = self.state.parsing, self.state.tenant or ""
        if issubclass(self._body_type, EngineBody):
            await held.enter_async_context(self._admission.reserve(1, 1, tenant))
        else:
            held.enter_context(self._admission.reserve_text_job(tenant))


def _parse(body_type: type[BaseModel], body: bytes) -> BaseModel:
    data = json.loads(body, parse_int=_parse_integer)
    try:
        return body_type.model_validate(data, from_attributes=True)
    except ValidationError as error:
        raise as_api_error(invalid_field(error.errors(include_url=False), data)) from None


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


@dataclass
class ValueCounter:
    """Counts the values of a JSON text as it arrives in pieces.

    The count is that of `[`, `{` and `,` outside of strings. Parsing millions of values blocks the server for seconds;
    counting those of one piece takes a millisecond.
    """

    count: int = 0
    _in_string: bool = False
    _escaping: bool = False  # whether the last piece ended with an escaping backslash

    def feed(self, piece: bytes) -> None:
        if self._escaping:
            piece = b"\\" + piece
        piece = _ESCAPED.sub(b"", piece)
        self._escaping = piece.endswith(b"\\")
        parts = piece.split(b'"')
        for part in parts[1 if self._in_string else 0 :: 2]:
            self.count += part.count(b",") + part.count(b"[") + part.count(b"{")
        self._in_string ^= len(parts) % 2 == 0


@dataclass(eq=False)
class LimitedBody:
    """An ASGI `receive` that limits a body's bytes, values and time of arrival.

    The byte limit does not rely on Content-Length. A request has arrived when its body is complete.
    """

    _receive: Receive
    _limits: Limits
    _held: SharedLimit  # bytes of the bodies of all requests in flight
    _metrics: Metrics
    _state: dict[str, Any]
    _tenant: str
    _deadline: float  # A time of the event loop's clock.
    _size: int = 0
    _values: ValueCounter = field(default_factory=ValueCounter)
    _complete: bool = False

    def __call__(self) -> Awaitable[Message]:
        # After a complete body the next message is the disconnect, without a time limit.
        return self._receive() if self._complete else self._receive_limited()

    async def _receive_limited(self) -> Message:
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
        self._size += len(piece)
        has_room = self._held.take(self._tenant, len(piece))
        if self._size > self._limits.max_body_bytes:
            raise too_large(self._limits.max_body_bytes)
        if not has_room:
            self._metrics.refused.labels("429").inc()
            raise too_busy("the server holds too many large requests; try again in a moment")
        self._values.feed(piece)
        if self._values.count > self._limits.max_body_values:
            raise APIError(400, f"the body has more than {self._limits.max_body_values} values", code="too_many_values")

    def release(self) -> None:
        self._held.give_back(self._tenant, self._size)


@dataclass(eq=False)
class LimitedUpload(LimitedBody):
    """The body of an upload: it may be longer and is not JSON, and only a part of it is in memory."""

    _uploaded: int = 0

    def _check(self, piece: bytes) -> None:
        self._uploaded += len(piece)
        if self._uploaded > self._limits.max_file_bytes:
            raise too_large(self._limits.max_file_bytes)


def too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than {limit} bytes", code="body_too_large")
