"""Reading the bodies of requests, the large ones off the event loop.

A body at the limit of values takes tens of milliseconds to parse, and as many to check. In a thread it still holds the
interpreter while it is parsed, but others get their turn before and after that, and while it is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from chairlift.serving.errors import APIError
from chairlift.serving.text_work import LONG, TextWork

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def reading_in_threads(text: TextWork) -> type[APIRoute]:
    """The class of routes whose large bodies are read by `text`."""

    class Route(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()
            model = None if self.body_field is None else self.body_field.field_info.annotation
            if not isinstance(model, type) or not issubclass(model, BaseModel):
                return handle
            kind: type[BaseModel] = model

            async def handle_large(request: Request) -> Response:
                return await handle(_LargeBody(request, kind, text))

            return handle_large

    return Route


class _LargeBody(Request):
    """What FastAPI asks for the JSON of a request. It gets a checked model instead, which it takes as it is."""

    def __init__(self, request: Request, model: type[BaseModel], text: TextWork) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self._text = text

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LONG:
            return await super().json()
        return await self._text.run(len(body), partial(_read, self._model, body))


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
