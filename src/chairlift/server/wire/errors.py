"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Message, Send

from chairlift.errors import EngineDead, EngineDied, InvalidParameter, TemporaryFailure, UnsupportedModel, is_full

log = logging.getLogger("chairlift.server")

ENGINE_DIED = "engine_died"  # code of the error of requests that were in flight


class APIError(HTTPException):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        message, param, self.code = _encodable(message), param and _encodable(param), code
        self.body: dict[str, Any] = {"error": {"message": message, "type": type_, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status_code, headers=self.headers)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which an error may quote but UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_api_error(error: Exception) -> APIError:
    """Convert an exception to an error for clients, without paths, tracebacks or class names."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidParameter):
        return APIError(400, str(error), param=error.parameter or None, code=error.code)
    if isinstance(error, UnsupportedModel):
        return APIError(400, "the model's chat template or tokenizer cannot take this input", code="invalid_value")
    if is_full(error):
        problem = "the server's disk is full; try again later"
        return APIError(507, problem, type_="server_error", code="insufficient_storage")
    if isinstance(error, TemporaryFailure):
        return unavailable("the request could not be answered just now; try again shortly")
    if isinstance(error, EngineDied):
        return unavailable("the engine is not available; try again shortly", code=ENGINE_DIED)
    if isinstance(error, EngineDead):
        return unavailable("the engine is not available; try again shortly")
    return APIError(500, "internal error", type_="server_error")


def log_unexpected(error: Exception, request_id: str) -> None:
    """Log an error of the server's own, with its traceback and without its message, which may quote a prompt."""
    frames = "" if is_full(error) else "\n" + "".join(traceback.format_tb(error.__traceback__))
    log.error("%s in the request %s%s", type(error).__name__, request_id, frames)


def unavailable(message: str, code: str | None = None) -> APIError:
    return APIError(503, message, type_="service_unavailable", code=code, headers={"Retry-After": "1"})


def too_busy(message: str) -> APIError:
    return APIError(429, message, type_="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def timed_out() -> APIError:
    problem = "the request's timeout passed before it was finished"
    return APIError(408, problem, type_="timeout_error", code="timeout")


# Converts an error body of OpenAI's format to that of another API, unless a server behind an ingress has done so. The
# arguments are the status, the body and the id of the request.
ErrorFormat = Callable[[int, dict[str, Any], str], dict[str, Any]]


class ConvertingSend:
    """An ASGI `send` that converts the errors of all layers, each once it is complete."""

    def __init__(self, send: Send, convert: ErrorFormat) -> None:
        self._send = send
        self._convert = convert
        self._start: Message | None = None  # An error's.
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": self.headers(message["headers"])}
            if message["status"] >= 400:
                self._start = message
                return
        if self._start is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)

    def headers(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers of a response, given those that the inner layers set."""
        return given

    async def _send_error(self, start: Message) -> None:
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        found, body = dict(headers), self._body
        if found.get(b"content-type") == b"application/json":  # the refusal of an origin is plain text
            request_id = found.get(b"x-request-id", b"").decode("latin-1")
            body = msgspec.json.encode(self._convert(start["status"], msgspec.json.decode(body), request_id))
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})
