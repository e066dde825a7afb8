"""Parsing request bodies, large ones in threads.

Parsing a body with the largest allowed number of values takes tens of milliseconds, and validating it takes as long.
Both hold the GIL, so streams wait meanwhile; the limit on values bounds this time. Threads let the streams run between
the two, and between bodies when many arrive at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from contextvars import copy_context
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.generation.admission import Admission
from chairlift.server.generation.tokenizer_pool import FairThreads
from chairlift.server.http.disconnect import unless_disconnected
from chairlift.server.http.errors import as_api_error
from chairlift.server.openai.strict import invalid_field
from chairlift.server.openai.types import EngineBody

LARGE_BODY = 20_000  # bytes
MAX_DIGITS = (
    400  # of an integer; no parameter has as many, and to read thousands of long ones takes a fraction of a second
)

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

            async def handle_large(request: Request) -> Response:
                async with AsyncExitStack() as parsing:
                    request.state.parsing = parsing
                    return await handle(_ThreadedBody(request, body_type, admission, threads))

            return handle_large

    return Route


class _ThreadedBody(Request):
    """A request whose `json()` returns a validated model for a large body, which FastAPI accepts."""

    def __init__(
        self, request: Request, body_type: type[BaseModel], admission: Admission, threads: FairThreads
    ) -> None:
        super().__init__(request.scope, request.receive)
        self._body_type = body_type
        self._admission = admission
        self._threads = threads

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LARGE_BODY:
            return await super().json()
        await self._reserve()
        parse = partial(copy_context().run, _parse, self._body_type, body)
        return await unless_disconnected(self, self._threads.run(self.state.tenant or "", len(body), parse))

    async def _reserve(self) -> None:
        """Reserve one completion, so that bodies of refused requests are not parsed; their real number is not known
        yet. It is held until the request reserves that (`end_admission_for_parsing`)."""
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
