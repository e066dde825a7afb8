"""Reading the bodies of requests, the large ones off the event loop.

A body at the limit of values takes tens of milliseconds to parse, and as many to check. Neither lets go of the
interpreter, so the streams wait meanwhile in any case: how long is what the limit on values bounds. A thread makes sure
that they get their turn between the two, and between one body and the next, however many have come at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.generation.admission import Admission
from chairlift.server.http.errors import APIError
from chairlift.server.http.sse import unless_disconnected
from chairlift.server.openai.types import Sampling

LARGE = 20_000  # bytes

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def threaded_body_route(admission: Admission) -> type[APIRoute]:
    """The class of routes whose large bodies are read in threads of their own, for clients who are let in."""
    threads = ThreadPoolExecutor(2, thread_name_prefix="body")

    class Route(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()
            model = None if self.body_field is None else self.body_field.field_info.annotation
            if not isinstance(model, type) or not issubclass(model, BaseModel):
                return handle
            kind: type[BaseModel] = model

            async def handle_large(request: Request) -> Response:
                return await handle(_LargeBody(request, kind, admission, threads))

            return handle_large

    return Route


class _LargeBody(Request):
    """What FastAPI asks for the JSON of a request. It gets a checked model instead, which it takes as it is."""

    def __init__(
        self, request: Request, model: type[BaseModel], admission: Admission, threads: ThreadPoolExecutor
    ) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self._admission = admission
        self._threads = threads

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LARGE:
            return await super().json()
        with self._place():
            reading = asyncio.get_running_loop().run_in_executor(self._threads, partial(_read, self._model, body))
            return await unless_disconnected(self, reading)

    def _place(self) -> AbstractContextManager[Any]:
        """Nothing is read for those who are turned away. How many completions it asks for is not known yet: one."""
        return self._admission.places(1, 1) if issubclass(self._model, Sampling) else self._admission.text_place()


def _read(model: type[BaseModel], body: bytes) -> BaseModel:
    data = json.loads(body)
    try:
        return model.model_validate(data, from_attributes=True)
    except ValidationError as error:
        raise invalid_value(error.errors(include_url=False)[0]) from None


def invalid_value(first: Any) -> APIError:
    """The first thing that pydantic found wrong with a body, by the name of the parameter."""
    place = [str(part) for part in first["loc"] if part != "body"]
    # Alternatives of a union are told apart by their types; a client knows the parameter alone.
    param = place[0] if place else None
    problem = "unknown parameter" if first["type"] == "extra_forbidden" else str(first["msg"])
    return APIError(400, f"{param or 'body'}: {problem}", param=param, code="invalid_value")
